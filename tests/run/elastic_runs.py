"""Real elastic runs, and what is done to their workers while they train."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from meshwright.run.elastic.epochs import epochs_path
from meshwright.spec.job import ElasticSpec
from meshwright.spec.plan import Design
from meshwright.train.observe.whereabouts import Section, last_seen
from tests.run.runs import design, losses
from tests.support.designs import Layout

PATIENCE_SECONDS = 240.0


def elastic(folder: Path, layout: Layout, *, steps: int, fewest: int = 2, **changes: Any) -> Design:
    spec = ElasticSpec(min_ranks=fewest, copies_every=changes.pop("copies_every", 1))
    return design(folder, layout, steps=steps, elastic=spec, **changes)


def member(name: str) -> psutil.Process:
    """The worker of that name that this process has launched."""
    for child in psutil.Process().children():
        if name in child.cmdline():
            return child
    raise AssertionError(f"no worker {name}")


def epochs(run: Path) -> list[dict[str, Any]]:
    path = epochs_path(run)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def until(known: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not known():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def until_step(run: Path, step: int) -> None:
    until(lambda: max(losses(run), default=0) >= step)


def kill_in(run: Path, name: str, *, rank: int, section: Section) -> None:
    """The worker, which has that rank, dies in that section of a step."""
    worker = member(name)

    def there() -> bool:
        seen = last_seen(run, rank)
        return seen is not None and seen.section is section

    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if there():
            worker.send_signal(signal.SIGSTOP)
            time.sleep(0.005)
            if there():
                worker.kill()
                return
            worker.send_signal(signal.SIGCONT)
    raise AssertionError(f"{name} was never seen in {section}")
