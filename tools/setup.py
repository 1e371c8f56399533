"""Makes `.venv` with everything the project needs, once. Standard library only.

Run by `make setup`, `make demo` and `make test`. A stamp of the project's metadata, its constraints and the
interpreter says when nothing has to be done. Where no GPU is seen, torch's CPU build is asked for first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "meshwright.stamp"
CONSTRAINTS = ROOT / "constraints.txt"
TORCH = "2.13.0"


def fail(message: str) -> None:
    print(f"setup: {message}", file=sys.stderr)
    raise SystemExit(4)


def wanted_stamp() -> str:
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(f"{sys.version_info[:2]} {ROOT}".encode())
    return digest.hexdigest()


def sees_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()


def make_venv() -> None:
    try:
        import ensurepip  # noqa: F401  (Debian packs it apart from python3)
    except ImportError:
        fail("this Python has no venv module; run: apt-get install python3-venv")
    print(f"setup: making .venv with Python {sys.version.split()[0]}", flush=True)
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)]).returncode:
        fail("could not make .venv; is the folder writable?")


def pip(*arguments: str, quiet: bool = False, index: str | None = None) -> bool:
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
    output = subprocess.DEVNULL if quiet else None
    environment = {**os.environ, **({"PIP_INDEX_URL": index} if index else {})}
    result = subprocess.run([*command, *arguments], stdout=output, stderr=output, cwd=ROOT, env=environment)
    return result.returncode == 0


def reuse_torch() -> bool:
    """On a GPU machine whose own Python has a torch we support, .venv sees that one through a path file."""
    probe = "import torch, pathlib; print(torch.__version__); print(pathlib.Path(torch.__file__).parent.parent)"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    lines = found.stdout.split()
    if found.returncode or len(lines) != 2 or not lines[0].startswith(("2.11.", "2.12.", "2.13.")):
        return False
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (VENV / "lib" / version / "site-packages" / "machine-torch.pth").write_text(lines[1] + "\n")
    print(f"setup: using this machine's torch {lines[0]}", flush=True)
    return True


def install_torch() -> None:
    if sees_gpu():
        if reuse_torch() or pip(f"torch=={TORCH}"):
            return
    else:
        print(f"setup: no GPU seen; installing the CPU build of torch {TORCH}", flush=True)
        if pip(f"torch=={TORCH}+cpu", quiet=True, index=os.environ.get("MESHWRIGHT_TORCH_INDEX")):
            return
        print(
            "setup: the package index has no CPU build of torch, so the default build comes (several GB); to avoid\n"
            "       it, set MESHWRIGHT_TORCH_INDEX to the CPU wheel index that pytorch.org names, and start again",
            flush=True,
        )
        if pip(f"torch=={TORCH}"):
            return
    fail(f"pip could not install torch {TORCH}; check the network, or set PIP_INDEX_URL to an index that has it")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  (this file runs before the floor is known)
        fail(f"Python 3.11 or newer is needed and this is {sys.version.split()[0]}; try: make PYTHON=python3.12 …")
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted_stamp():
        return
    make_venv()
    install_torch()
    print("setup: installing meshwright and its libraries", flush=True)
    if not pip("-e", ".[dev]"):
        fail(
            "pip could not install the requirements; check the network, or set PIP_INDEX_URL to an index that has them"
        )
    STAMP.write_text(wanted_stamp())
    print("setup: done", flush=True)


if __name__ == "__main__":
    main()
