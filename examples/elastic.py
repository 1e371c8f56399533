"""Train, kill a worker on the way, and see the others train on: python examples/elastic.py PLAN RUN

PLAN is the file of a plan whose job allows it (`job.elastic.min_ranks`).
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import psutil

from meshwright.run.files import load_design
from meshwright.run.train import train
from meshwright.train.observe.whereabouts import last_seen

STEPS = 10
KILLED_AFTER = 3


def kill_the_last(run: Path, place: int) -> None:
    """The worker of that place is killed in a step."""
    seen = last_seen(run, place)
    while seen is None or seen.step <= KILLED_AFTER:
        time.sleep(0.01)
        seen = last_seen(run, place)
    for child in psutil.Process().children():
        if f"{place}.0" in child.cmdline():
            child.kill()


def main() -> int:
    design, run = load_design(Path(sys.argv[1])), Path(sys.argv[2])
    place = design.plan.world_size - 1
    threading.Thread(target=kill_the_last, args=(run, place), daemon=True).start()
    outcome = train(design, run_dir=run, steps=STEPS)
    assert outcome.goodput is not None
    for one in outcome.goodput.interruptions:
        print(f"on from step {one.step}, {one.lost_seconds:.2f} s lost, {one.undone_steps} steps undone: {one.why}")
    return 0 if outcome.goodput.failures == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
