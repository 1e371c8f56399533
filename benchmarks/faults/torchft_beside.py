"""The loss of one of several replicas under torchft, measured as ours is: a quorum of replicas, each a process."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.run.files import write_json
from meshwright.spec.plan import Design

_REPLICA = Path(__file__).with_name("torchft_replica.py")
_LEAST_SECONDS = 2.0
_STEPS_WAITED = 8.0
_TICK_MS = 100


def installed() -> bool:
    """`pip install meshwright[beside]` does."""
    return importlib.util.find_spec("torchft") is not None


def patience(step_seconds: float) -> float:
    """Seconds that a collective may take: what nobody needs, since every loss of a replica costs as much. The time to
    join is the same, for a quorum waits so long for one that is gone; those of quorums and connections lie above."""
    return max(_LEAST_SECONDS, _STEPS_WAITED * step_seconds)


@contextmanager
def errors_in(path: Path) -> Iterator[None]:
    """What this process writes on standard error, as the lighthouse does of every step, is in a file."""
    before = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def torchft(
    design: Design,
    run: Path,
    *,
    steps: int,
    lost: int,
    step_seconds: float,
    until: Callable[[Callable[[], bool]], None],
) -> dict[str, Any]:
    """One replica is killed after so many steps, and another is started in its place when the others train."""
    from torchft.coordination import LighthouseServer

    run.mkdir()
    write_json(run / "design.json", design)
    wait, count = patience(step_seconds), design.plan.data
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=round(1000 * wait), quorum_tick_ms=_TICK_MS
    )

    def start(replica: int) -> subprocess.Popen[bytes]:
        words = [str(_REPLICA), str(run), "--replica", str(replica), "--patience", str(wait)]
        words += ["--lighthouse", lighthouse.address(), *(["--tells"] if replica == 0 else [])]
        with (run / "torchft.log").open("ab") as log:
            return subprocess.Popen([sys.executable, *words], stdout=log, stderr=log)

    def rows() -> list[dict[str, Any]]:
        path = run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    replicas = [start(replica) for replica in range(count)]
    try:
        until(lambda: sum(row["ranks"] == count for row in rows()) >= steps)
        killed, before = time.time(), rows()
        replicas[lost].kill()
        replicas[lost].wait()
        until(lambda: any(row["at"] > killed and row["ranks"] == count - 1 for row in rows()))
        replicas[lost] = start(lost)
        until(lambda: rows()[-1]["at"] > killed and rows()[-1]["ranks"] == count)
        after = [row for row in rows() if row["at"] > killed]
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        lighthouse.shutdown()
    return _figures(before, after, killed=killed, count=count) | {"patience_seconds": wait}


def _figures(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], *, killed: float, count: int
) -> dict[str, float]:
    """Of what was committed before and after one of `count` replicas was `killed`."""
    whole = [row["at"] for row in before if row["ranks"] == count]
    alone = next(place for place, row in enumerate(after) if row["ranks"] < count)
    back = next(place for place, row in enumerate(after) if place > alone and row["ranks"] == count)
    return {
        "usual_step_seconds": statistics.median(later - sooner for sooner, later in pairwise(whole)),
        "stall_seconds": after[alone]["at"] - killed,
        "back_seconds": after[back]["at"] - killed,
        "growth_seconds": after[back]["at"] - after[back - 1]["at"],
    }
