"""Logs: what the ranks and nodes of a run's newest launch wrote, gathered from its directory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.run.files import design_of_run
from meshwright.run.launching.shares import shares
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design

_STREAMS = ("stdout", "stderr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The last `lines` of a file; `rank` is None where a whole node or job writes to it, and `node` of a whole job."""

    path: str
    node: int | None
    rank: int | None
    stream: str
    lines: tuple[str, ...]


def logs(run_dir: Path, *, rank: int | None = None, tail: int = 20) -> tuple[Log, ...]:
    """Files that are not empty, those of jobs and nodes first and then by rank; of one `rank` where it is given.

    Raises ConfigError where there is no run, or no such rank.
    """
    design = design_of_run(run_dir)
    if rank is not None and not 0 <= rank < design.plan.world_size:
        what = f"there is no rank {rank}"
        fix = f"ranks of this run are 0 to {design.plan.world_size - 1}"
        raise ConfigError(Problem(what=what, where="--rank", fix=fix))
    folder = run_dir / "logs"
    found = [*_whole(folder, tail=tail), *_of_ranks(design, folder, tail=tail)]
    wanted = [log for log in found if log.lines and rank in (None, log.rank)]
    return tuple(sorted(wanted, key=lambda log: (-1 if log.rank is None else log.rank, log.path)))


def _whole(folder: Path, *, tail: int) -> Iterator[Log]:
    """What schedulers and hosts over ssh wrote: files of the folder itself."""
    for path in sorted(folder.glob("*")):
        if path.is_file():
            head, _, rest = path.name.partition("-")
            node = rest.partition("-")[0]
            number = int(node) if head == "node" and node.isdigit() else None
            yield Log(path=str(path), node=number, rank=None, stream="output", lines=_last(path, tail))


def _of_ranks(design: Design, folder: Path, *, tail: int) -> Iterator[Log]:
    """What the newest launch of every node kept of its workers, which it numbers by their places on the node."""
    for share in shares(design):
        kept = folder / f"node-{share.node}"
        launches = [path for path in (kept if kept.is_dir() else folder).glob("*/attempt_*") if path.is_dir()]
        if not launches or (share.node and not kept.is_dir()):
            continue
        newest = max(launches, key=lambda path: path.stat().st_mtime)
        for local in range(share.count):
            rank = design.plan.rank_on(share.first + local)
            for stream in _STREAMS:
                path = newest / str(local) / f"{stream}.log"
                if path.is_file():
                    yield Log(path=str(path), node=share.node, rank=rank, stream=stream, lines=_last(path, tail))


def _last(path: Path, tail: int) -> tuple[str, ...]:
    with path.open(errors="replace") as lines:
        return tuple(line.rstrip("\n") for line in deque(lines, maxlen=tail))
