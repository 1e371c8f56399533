"""The newest collectives of every rank, in a file of its own that is there when the rank is not: RUN/collectives."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec.json_text import parse_json

KEPT = 2048
OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)
BETWEEN_TWO = frozenset({"send", "recv"})
_CODES = {name: code for code, name in enumerate(OPERATIONS)}
_MAGIC = b"MWCL"
_HEAD = struct.Struct("<4sIQQ")  # what this is, how many are kept, how many were entered, the process
_COUNT = struct.Struct("<Q")
_COUNT_AT = 8
# sequence, step, peer, group, operation, bytes, seconds before it, entered, left, seconds inside
_ENTRY = struct.Struct("<IIiHBxQfddf")
_LEFT = struct.Struct("<df")
_LEFT_AT = _ENTRY.size - _LEFT.size
_INSIDE = struct.Struct("<f")
_INSIDE_AT = _ENTRY.size - _INSIDE.size
_HELD = -1.0  # in the place of the seconds inside, while they pass
_NOBODY = -1
_MOST_RANKS = 1 << 20
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as torch names it, and its ranks in order."""

    name: str
    ranks: tuple[int, ...]
    described: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One collective, send or receive as this rank met it; times are seconds of the system clock.

    `sequence` counts the collectives of a group from 1, and apart from them its sends and receives, whose other end is
    rank `peer`. The rank had computed for `before_seconds` since it came out of the one before, and was held for
    `inside_seconds` in the call and in the wait that ended it. `left` is None where it never came out: it is held there
    where it `holds`, else what it began is on its way.
    """

    sequence: int
    step: int
    group: Group
    operation: str
    bytes: int
    before_seconds: float
    entered: float
    left: float | None
    inside_seconds: float
    holds: bool = False
    peer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """What one rank wrote, the oldest first."""

    rank: int
    process: int
    entries: tuple[Entry, ...]


class CollectiveLog:
    """Writes `RUN/collectives/rank-00000.bin`: a ring of `KEPT` entries of 48 bytes, in memory that the system brings
    to the file whatever becomes of this process; the groups are in a `.json` beside it.

    `waited_seconds` is all that this rank was held in collectives. Where no file can be mapped the entries are lost and
    nothing else.
    """

    def __init__(self, run_dir: Path | None, *, rank: int, kept: int = KEPT) -> None:
        self.waited_seconds = 0.0
        self._kept, self._count, self._step = kept, 0, 0
        self._offset = time.time() - time.perf_counter()
        self._out = self._begun = time.perf_counter()
        self._waited_before = 0.0
        self._groups: list[Group] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._sequences: list[list[int]] = []
        self._path = None if run_dir is None else path_of(run_dir, rank)
        self._memory: mmap.mmap | bytearray = bytearray(_HEAD.size + kept * _ENTRY.size)
        if self._path is not None:
            with suppress(OSError):
                self._memory = _mapped(self._path, len(self._memory))
        _HEAD.pack_into(self._memory, 0, _MAGIC, kept, 0, os.getpid())

    def number_of(self, name: str, size: int) -> int | None:
        """The number of a group that is known."""
        return self._numbers.get((name, size))

    def know(self, group: Group) -> int:
        """The number of a group that is met for the first time."""
        self._groups.append(group)
        self._sequences.append([0, 0])
        self._numbers[group.name, len(group.ranks)] = len(self._groups) - 1
        if self._path is not None:
            with suppress(OSError):
                self._write_groups(self._path)
        return len(self._groups) - 1

    def stay(self) -> None:
        """What is kept is in its files, where the run directory was made again without them."""
        if self._path is None or self._path.is_file():
            return
        with suppress(OSError):
            memory = _mapped(self._path, len(self._memory))
            memory[:] = bytes(self._memory)
            self._memory = memory
            self._write_groups(self._path)

    def begin_step(self, number: int) -> None:
        """What follows is of step `number`."""
        self._step, self._begun, self._waited_before = number, time.perf_counter(), self.waited_seconds

    def step_seconds(self) -> tuple[float, float]:
        """Since the step began: all of it, and what of it was waited."""
        return time.perf_counter() - self._begun, self.waited_seconds - self._waited_before

    def enter(self, group: int, operation: str, num_bytes: int, *, peer: int = _NOBODY) -> int:
        """This rank is about to call `operation`; the slot that `leave` is given."""
        now = time.perf_counter()
        sequences, two = self._sequences[group], operation in BETWEEN_TWO
        sequences[two] += 1
        slot = _HEAD.size + self._count % self._kept * _ENTRY.size
        before = now - self._out
        _ENTRY.pack_into(
            self._memory, slot, sequences[two] & 0xFFFFFFFF, self._step, peer, group, _CODES[operation], num_bytes,
            before, now + self._offset, 0.0, _HELD,
        )  # fmt: skip
        self._count += 1
        _COUNT.pack_into(self._memory, _COUNT_AT, self._count)
        self._out = now
        return slot

    def begun(self, slot: int) -> None:
        """What was entered in `slot` is on its way, and does not hold this rank."""
        _INSIDE.pack_into(self._memory, slot + _INSIDE_AT, 0.0)

    def waits(self, slot: int) -> None:
        """What was entered in `slot` holds this rank again."""
        _INSIDE.pack_into(self._memory, slot + _INSIDE_AT, _HELD)

    def held(self, since: float) -> float:
        """This rank was held since `since`, seconds of time.perf_counter(), until now; for how long."""
        now = time.perf_counter()
        self._out = now
        self.waited_seconds += now - since
        return now - since

    def leave(self, slot: int, *, inside_seconds: float) -> None:
        """What was entered in `slot` is over."""
        _LEFT.pack_into(self._memory, slot + _LEFT_AT, self._out + self._offset, inside_seconds)

    def _write_groups(self, path: Path) -> None:
        told = [{"name": it.name, "described": it.described, "runs": _runs(it.ranks)} for it in self._groups]
        fresh = path.with_suffix(".partial")
        fresh.write_text(json.dumps({"groups": told}))
        fresh.replace(path.with_suffix(".json"))


def path_of(run_dir: Path, rank: int) -> Path:
    return run_dir / "collectives" / f"rank-{rank:05d}.bin"


def keep_logs_of(run_dir: Path, *, ranks: int) -> None:
    """Files of ranks that were there before, and are not among the first `ranks`, are gone."""
    for path in (run_dir / "collectives").glob("rank-*"):
        if int(path.stem.partition("-")[2]) >= ranks:
            path.unlink(missing_ok=True)


def read_logs(run_dir: Path) -> dict[int, RankLog]:
    """What every rank of the newest launch wrote; ranks whose file is none, or cut off, are left out."""
    found = {}
    for path in sorted((run_dir / "collectives").glob("rank-*.bin")):
        with suppress(*_UNREADABLE):
            log = _read(path)
            found[log.rank] = log
    return found


def _read(path: Path) -> RankLog:
    document = parse_json(path.with_suffix(".json").read_text())
    groups = [
        Group(name=str(told["name"]), ranks=_unrolled(told["runs"]), described=str(told["described"]))
        for told in document["groups"]
    ]
    memory = path.read_bytes()
    magic, kept, count, process = _HEAD.unpack_from(memory)
    if magic != _MAGIC or not kept:
        raise ValueError("not a log of collectives")
    first = max(count - kept, 0)
    entries = [_entry(memory, _HEAD.size + number % kept * _ENTRY.size, groups) for number in range(first, count)]
    return RankLog(rank=int(path.stem.partition("-")[2]), process=process, entries=tuple(entries))


def _entry(memory: bytes, slot: int, groups: Sequence[Group]) -> Entry:
    sequence, step, peer, group, code, num_bytes, before, entered, left, inside = _ENTRY.unpack_from(memory, slot)
    return Entry(
        sequence=sequence,
        step=step,
        group=groups[group],
        operation=OPERATIONS[code],
        bytes=num_bytes,
        before_seconds=before,
        entered=entered,
        left=left or None,
        inside_seconds=max(inside, 0.0),
        holds=inside == _HELD,
        peer=None if peer == _NOBODY else groups[group].ranks[peer],
    )


def _mapped(path: Path, size: int) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text('{"groups": []}')
    # Not in the place of the old bytes: the process that had this rank before may still have them in its memory.
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(bytes(size))
    fresh.replace(path)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as runs of (first, step, how many): groups of a mesh are few of them, however many their ranks are."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][2] == 1:
            runs[-1] = [runs[-1][0], rank - runs[-1][0], 2]
        elif runs and rank == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([rank, 1, 1])
    return runs


def _unrolled(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    if sum(int(count) for _, _, count in runs) > _MOST_RANKS:
        raise ValueError("a group of more ranks than any cluster has")
    return tuple(int(first) + int(step) * place for first, step, count in runs for place in range(int(count)))
