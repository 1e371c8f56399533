"""What the loss of one of four replicas costs by each backend of elastic runs: our own, and torchft, where it is there.

    python benchmarks/faults/lost_replica.py [--steps 30]

Both train the same design; the worker of one replica is killed (kill -9), and another is started in its place. Told is
the time until the others have ended a step, and until the other one has ended one with them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import torchft_beside
from lost_rank import LAYOUTS, ROWS, design_of, watched

from meshwright.run.elastic.epochs import epochs_path
from meshwright.run.train import train
from meshwright.spec.job import ElasticBackend, ElasticSpec
from meshwright.spec.plan import Design

LOST = "2.0"


def moments(run: Path) -> list[float]:
    """When each epoch began: told before its first step by our own backend, and with it by torchft."""
    path = epochs_path(run)
    return [json.loads(line)["at"] for line in path.read_text().splitlines()] if path.is_file() else []


def lost(design: Design, run: Path, *, backend: ElasticBackend, steps: int) -> str:
    """A line of what was measured."""
    entry = replace(design, job=replace(design.job, elastic=ElasticSpec(min_ranks=2, backend=backend)))
    told: list[str] = []

    with watched(run) as lines:

        def act() -> None:
            lines.until(lambda: lines.step >= steps)
            usual = statistics.median(b[0] - a[0] for a, b in zip(lines.seen[5:], lines.seen[6:], strict=False))
            next(child for child in psutil.Process().children() if LOST in child.cmdline()).kill()
            killed = time.time()
            lines.until(lambda: len(moments(run)) >= 2 and lines.seen[-1][0] > moments(run)[1])
            stall = lines.first_after(moments(run)[1])[0] - killed
            lines.until(lambda: len(moments(run)) >= 3 and lines.seen[-1][0] > moments(run)[2])
            back = lines.first_after(moments(run)[2])[0] - killed
            told.append(
                f"{backend}: {stall:.2f} s until the others train, {back:.2f} s until it is back; {usual:.3f} s"
            )
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        train(entry, run_dir=run, say=lambda _line: None)
        thread.join()
    return told[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    design = design_of(LAYOUTS["replicas"], rows=ROWS)
    for backend in ElasticBackend:
        if backend is ElasticBackend.TORCHFT and not torchft_beside.installed():
            continue
        with tempfile.TemporaryDirectory() as folder:
            print(lost(design, Path(folder) / "run", backend=backend, steps=options.steps), flush=True)


if __name__ == "__main__":
    main()
