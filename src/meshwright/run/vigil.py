"""Vigil: ranks that stand still though no other one waits for them, told by their marks and by what they compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from meshwright.spec.errors import Problem
from meshwright.spec.rank_words import ranks_in_words
from meshwright.spec.units import format_seconds
from meshwright.train.observe.collective_log import read_logs
from meshwright.train.observe.inquest import held_in
from meshwright.train.observe.whereabouts import Section, Whereabouts, last_seen

_LOOK_SECONDS = 0.5
_MOST_SECONDS = 2.0  # of one look: while this process is suspended nobody is watched
_MARGIN_SECONDS = 0.5  # others that wait are to say so first
_LONG_SECONDS = 1800.0
_LONG = frozenset({Section.BUILD, Section.SAVE, Section.RESTORE})
STACK_SECONDS = 0.4  # in which a rank that is asked for its stacks writes them
_TIMES = 10.0  # as long as the longest of its kind in this launch
_IDLE = 0.05  # of one core, in the second half of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class Stood:
    """A rank that was `seen` there `seconds` ago, and has neither moved nor computed since."""

    rank: int
    seen: Whereabouts
    seconds: float


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A rank since its newest mark: how long it has been silent, and what it had computed when it was sampled."""

    seen: Whereabouts
    silent: float = 0.0
    sampled: float = 0.0
    computed: float | None = None


class Vigil:
    """Of ranks of the run in `run_dir` whose processes are on this host.

    A rank that reads data, or that is `alone`, has stood still after `patience_seconds`; where others may be what it
    waits for, after twice as long; while it builds, saves or goes back, after half an hour or as long; never before ten
    times the longest of the kind in this launch, and never while its processes compute or a collective holds it.
    """

    def __init__(
        self, run_dir: Path, *, patience_seconds: float, alone: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir, self._patience, self._alone, self._clock = run_dir, patience_seconds, alone, clock
        self._looked = clock()
        self._watched: dict[int, _Watched] = {}
        self._longest: dict[Section, float] = {}

    def look(self, workers: Mapping[int, psutil.Process]) -> tuple[Stood, ...]:
        """Of `workers` by rank those that have stood still too long. Asked often, it looks twice a second."""
        passed = self._clock() - self._looked
        if passed < _LOOK_SECONDS:
            return ()
        self._looked += passed
        still = [rank for rank, process in workers.items() if self._is_still(rank, process, min(passed, _MOST_SECONDS))]
        if not still:
            return ()
        logs = read_logs(self._run_dir)
        held = {rank for rank in still if rank in logs and held_in(logs[rank]) is not None}
        free = [rank for rank in still if rank not in held or logs[rank].process != workers[rank].pid]
        return tuple(
            Stood(rank=rank, seen=self._watched[rank].seen, seconds=self._watched[rank].silent) for rank in free
        )

    def limit(self, section: Section) -> float:
        """The seconds that a rank may be silent in `section`."""
        shared = section is not Section.INPUT and not self._alone
        most = (2.0 if shared else 1.0) * self._patience + _MARGIN_SECONDS
        if section in _LONG:
            most = max(most, _LONG_SECONDS)
        return max(most, _TIMES * self._longest.get(section, 0.0))

    def _is_still(self, rank: int, process: psutil.Process, passed: float) -> bool:
        seen, before = last_seen(self._run_dir, rank), self._watched.get(rank)
        if seen is None or seen.process != process.pid:
            return False
        if before is None or (before.seen, before.seen.at) != (seen, seen.at):
            if before is not None and before.seen.process == seen.process:
                section = before.seen.section
                self._longest[section] = max(self._longest.get(section, 0.0), before.silent)
            self._watched[rank] = _Watched(seen=seen)
            return False
        before.silent += passed
        half = self.limit(seen.section) / 2.0
        if before.silent - before.sampled < half:
            return False
        spent, since = computed(process), before.silent - before.sampled
        idle = before.computed is not None and spent - before.computed < _IDLE * since
        if idle and not _is_running(process) and before.silent >= 2.0 * half:
            return True
        before.sampled, before.computed = before.silent, spent
        return False


def stood_still(found: Sequence[Stood]) -> Problem:
    """What is told of them."""
    alike: dict[str, list[Stood]] = {}
    for each in found:
        alike.setdefault(str(each.seen), []).append(each)
    told = [
        f"{ranks_in_words([each.rank for each in those])} stood still in {where} for "
        f"{format_seconds(min(each.seconds for each in those))}"
        for where, those in alike.items()
    ]
    return Problem(
        what="; ".join(told),
        why="neither moved nor computed: what it waits for may be a disk or a file system that does not answer",
        fix="see RUN/stacks and the log of its machine for why; --resume goes on",
    )


def _is_running(process: psutil.Process) -> bool:
    """Whether it computes, or would if there were a processor for it."""
    try:
        return bool(process.status() == psutil.STATUS_RUNNING)
    except psutil.Error:
        return False


def computed(process: psutil.Process) -> float:
    """Seconds of processors that it and its children have had."""
    total = 0.0
    try:
        spent = process.cpu_times()
        total = spent.user + spent.system + spent.children_user + spent.children_system
        for child in process.children(recursive=True):
            each = child.cpu_times()
            total += each.user + each.system
    except psutil.Error:
        return total
    return total
