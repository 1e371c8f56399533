"""Dry runs of the best plans of Llama-3.1-405B on 16,384 H100 and of Kimi-K2 on 3,072, from the shell to the answer.

Seconds of processors are those of every process of the dry run, ended or not when its command ends. Memory is what all
of them hold together, pages that they share counted once, looked at twice a second. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record

COMMAND = str(Path(sys.executable).parent / "meshwright")
PLANS = {
    "Llama-3.1-405B on 16,384 H100": ("llama-3.1-405b", "16384xH100", "--set", "sequence_length=8192"),
    "Kimi-K2 on 3,072 H100": ("kimi-k2", "3072xH100"),
}
FITS, DOES_NOT_FIT = 0, 3
MOST_SECONDS, MOST_BYTES = 15.0, float(1 << 30)
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one dry run took."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: float


def counted(plan: Path, *, environment: dict[str, str]) -> Counted:
    """Raises CalledProcessError where the dry run fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [COMMAND, "dryrun", str(plan), "--json"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    peak = 0.0
    while running.poll() is None:
        peak = max(peak, held(running.pid))
        with suppress(subprocess.TimeoutExpired):
            running.wait(0.5)
    wall = time.perf_counter() - start
    if running.returncode not in (FITS, DOES_NOT_FIT):
        raise subprocess.CalledProcessError(running.returncode, command)
    wait_for_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Counted(wall_seconds=wall, cpu_seconds=cpu, peak_bytes=peak)


def held(pid: int) -> float:
    """Bytes of a process and those that it began."""
    total = 0.0
    with suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            total += process.memory_full_info().pss
    return total


def wait_for_orphans() -> None:
    """Until what processes left behind has ended too."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def rows(name: str, found: Sequence[Counted]) -> list[record.Row]:
    """Of the quickest run."""
    best = min(found, key=lambda entry: entry.wall_seconds)
    peak = max(entry.peak_bytes for entry in found)
    return [
        record.Row(
            name=f"{name}, from the shell to the table",
            target=f"< {MOST_SECONDS:.0f} s",
            measured=f"{best.wall_seconds:.1f} s, {best.cpu_seconds:.1f} s of processors",
            holds=best.wall_seconds < MOST_SECONDS,
        ),
        record.Row(
            name=f"{name}, memory of all processes",
            target="< 1 GiB",
            measured=f"{peak / MOST_BYTES:.2f} GiB",
            holds=peak < MOST_BYTES,
        ),
    ]


def main() -> None:
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    told, raw = [], {}
    with tempfile.TemporaryDirectory() as folder:
        # Modules are compiled before, as an installed package's are, whatever this shell tells Python of bytecode.
        shell = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        shell |= {"PYTHONPYCACHEPREFIX": str(Path(folder) / "compiled"), "COLUMNS": "120"}
        subprocess.run([COMMAND, "dryrun", "--help"], check=True, stdout=subprocess.DEVNULL, env=shell)
        for name, (model, cluster, *settings) in PLANS.items():
            plan = Path(folder) / f"{model}.json"
            made = [COMMAND, "plan", "--model", model, "--cluster", cluster, *settings, "--out", str(plan)]
            subprocess.run(made, check=True, stdout=subprocess.DEVNULL, env=shell)
            found = [counted(plan, environment=shell) for _ in range(times)]
            told += rows(name, found)
            raw[name] = [asdict(entry) for entry in found]
    record.finish("dryrun", told, raw)


if __name__ == "__main__":
    main()
