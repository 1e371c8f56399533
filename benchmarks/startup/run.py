"""CPU seconds from the shell to the answer: `--help`, and a plan of Llama-3.1-405B on 16,384 H100.

Modules are compiled before, as an installed package's are, whatever this shell tells Python of bytecode.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record

COMMAND = str(Path(sys.executable).parent / "meshwright")
RUNS = 7


def timed(arguments: list[str], *, compiled: str) -> tuple[float, float]:
    """CPU (user and system) and wall seconds of one whole process that keeps its modules in the folder `compiled`."""
    shell = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    shell |= {"PYTHONPYCACHEPREFIX": compiled, "COLUMNS": "120"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL, env=shell)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall


def main() -> None:
    plan = ["plan", "--model", "llama-3.1-405b", "--cluster", "16384xH100"]
    raw = {}
    with tempfile.TemporaryDirectory() as compiled:
        for name, arguments in (("help", ["--help"]), ("plan", plan)):
            timed(arguments, compiled=compiled)
            runs = [timed(arguments, compiled=compiled) for _ in range(RUNS)]
            raw[name] = {"cpu_seconds": [cpu for cpu, _ in runs], "wall_seconds": [wall for _, wall in runs]}
    help_cpu = statistics.median(raw["help"]["cpu_seconds"])
    plan_wall = statistics.median(raw["plan"]["wall_seconds"])
    check = "import sys; from meshwright.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
    check += "print('torch' in sys.modules, file=sys.stderr)"
    probe = subprocess.run([sys.executable, "-c", check, *plan], capture_output=True, text=True)
    without_torch = probe.stderr.strip().endswith("False")
    rows = [
        record.Row(
            name="meshwright --help, CPU (median of 7)",
            target="< 0.5 s",
            measured=f"{help_cpu:.2f} s",
            holds=help_cpu < 0.5,
        ),
        record.Row(
            name="plan of Llama-3.1-405B on 16,384 H100, shell to table (median of 7)",
            target="< 2 s",
            measured=f"{plan_wall:.2f} s",
            holds=plan_wall < 2.0,
        ),
        record.Row(
            name="torch imported by that plan",
            target="no",
            measured="no" if without_torch else "yes",
            holds=without_torch,
        ),
    ]
    record.finish("startup", rows, raw)


if __name__ == "__main__":
    main()
