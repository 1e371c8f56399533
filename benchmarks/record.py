"""What every benchmark shares: the machine and versions, the table `target | measured`, and the raw numbers kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One promise: what it must reach, what was measured, and whether that holds."""

    name: str
    target: str
    measured: str
    holds: bool


def machine() -> dict[str, Any]:
    """Processor, cores, memory and the versions of what was run."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    versions = {}
    for package in ("meshwright", "torch", "numpy"):
        versions[package] = importlib.metadata.version(package)
    return {
        "accelerators": accelerators(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def accelerators() -> list[str]:
    """Those of NVIDIA that are here, with the versions of their driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, check=False, capture_output=True, text=True).stdout.splitlines()


def finish(name: str, rows: Sequence[Row], raw: Any) -> None:
    """Prints the table, writes `results/NAME.json`, and exits 3 when a promise does not hold."""
    width = max(len(row.name) for row in rows)
    target = max(len(row.target) for row in rows)
    print(f"\n{'':{width}}  {'target':{target}}  measured")
    for row in rows:
        print(f"{row.name:{width}}  {row.target:{target}}  {row.measured}{'' if row.holds else '   NOT REACHED'}")
    path = keep(name, rows, raw)
    print(f"\nraw numbers: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    sys.exit(0 if all(row.holds for row in rows) else 3)


def keep(name: str, rows: Sequence[Row], raw: Any) -> Path:
    """Writes `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {"benchmark": name, "machine": machine(), "rows": [asdict(row) for row in rows], "raw": raw}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
