"""Hung: workers that others wait for in vain, or that stand still though nobody waits for them, are named and ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from meshwright.run.elastic.board import Board, Epoch, Left
from meshwright.run.elastic.crew import Crew
from meshwright.run.elastic.halted import Halted
from meshwright.run.signals import send
from meshwright.run.vigil import STACK_SECONDS, Stood, Vigil, computed, stood_still
from meshwright.spec.incident import Incident, Trouble
from meshwright.spec.units import format_seconds
from meshwright.train.observe import incidents
from meshwright.train.observe.inquest import inquest, stood_in
from meshwright.train.observe.whereabouts import last_seen

_DOUBT_SECONDS = 0.5  # for which one that others name does nothing before it is ended
_IDLE = 0.05
WAITED_FOR = "did not come to where the others waited: hung or stopped"


@dataclass(slots=True, kw_only=True)
class Hung:
    """Of the workers of one host. `found` has what is told of those that were ended, by name, and `stood` those of them
    that nobody waited for."""

    run_dir: Path
    board: Board
    crew: Crew
    patience_seconds: float
    found: dict[str, str] = field(default_factory=dict)
    stood: dict[str, Stood] = field(default_factory=dict)
    _halted: Halted = field(default_factory=Halted)
    _vigil: Vigil | None = None
    _asked: dict[str, float] = field(default_factory=dict)
    _named: dict[str, tuple[float, float]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Other workers train than before."""
        self.found, self._vigil, self._asked, self._named, self._told = {}, None, {}, {}, set()
        self._halted.forget()

    def watch(self, ranks: Mapping[str, int], *, alone: bool) -> None:
        """Those of `ranks`, by name, that stand still are asked for their stacks, and ended."""
        processes = {name: process for name in ranks if (process := self._process(name)) is not None}
        if self._vigil is None:
            self._vigil = Vigil(self.run_dir, patience_seconds=self.patience_seconds, alone=alone)
        found = self._vigil.look({ranks[name]: process for name, process in processes.items()})
        for each in found:
            name = next(name for name, rank in ranks.items() if rank == each.rank)
            if name not in self._asked:
                self._asked[name], self.stood[name] = time.time(), each
                self.tell(name, stood_still([each]).what, rank=each.rank)
                send(processes[name], signal.SIGUSR2)
        for name, since in self._asked.items():
            if name in processes and time.time() - since > STACK_SECONDS:
                send(processes[name], signal.SIGKILL)

    def form(self, epoch: Epoch, ranks: Mapping[str, int]) -> None:
        """Those of `ranks` that are stopped for too long are ended while others, who have come into `epoch`, wait for
        them; once it is at work they are waited for in its steps alone."""
        if not self._halted.is_due:
            return
        came = set[str]() if self.board.is_at_work(epoch.number) else self.board.came(epoch)
        if not came or came <= self._end_halted(ranks).keys():
            self._halted.forget()

    def end(self, missing: Mapping[str, int], left: Sequence[Left], *, noticed: float) -> None:
        """Those `missing` that others waited for too long are ended: at once where they are stopped, soon where the
        logs of the others name them and they do nothing, and in the end whatever they do. Where nobody has left whom
        they could wait with, as all others are gone, they are ended once they are stopped for too long."""
        if self._halted.is_due:
            self._end_halted(missing)
        waited = any(one.waiting is not None and one.waiting.timed_out for one in left)
        late = time.time() - noticed > self.patience_seconds
        named = self._idle(missing, inquest(self.run_dir).suspects) if waited and missing else set()
        for name, rank in missing.items():
            pid = self.board.pid(name)
            if pid is None or not left or not (late or waited):
                continue
            if self.crew.end_stopped(name, pid=pid, late=late or name in named):
                self.tell(name, f"rank {rank} {WAITED_FOR}", rank=rank)

    def tell(self, name: str, words: str, *, rank: int) -> None:
        """The worker is lost, which the records of the run say once."""
        self.found.setdefault(name, words)
        self.note(name, words, rank=rank)

    def note(self, name: str, words: str, *, rank: int) -> None:
        """As `tell`, of one that has ended by itself."""
        if name in self._told:
            return
        self._told.add(name)
        seen = last_seen(self.run_dir, rank)
        step = seen.step if seen is not None else 0
        lost = Incident(trouble=Trouble.LOST, begun=step, at=time.time(), what=words, ranks=(rank,), ended=step)
        incidents.keep(self.run_dir, lost)

    def sentences(self) -> tuple[str, ...]:
        """Where those stood that nobody waited for."""
        return stood_in(self.run_dir, [each.rank for each in self.stood.values()])

    def _end_halted(self, ranks: Mapping[str, int]) -> Mapping[str, float]:
        """Those of `ranks` that are stopped, and for how many seconds: they are ended once that is too long."""
        running = [name for name in ranks if self._is_running(name)]
        found = {name: self._process(name) or self.crew.process(name) for name in running}
        processes = {name: process for name, process in found.items() if process is not None}
        stopped = self._halted.look(processes)
        for name, seconds in stopped.items():
            if seconds >= self.patience_seconds:
                words = f"rank {ranks[name]} was stopped for {format_seconds(seconds)} and did not go on"
                self.tell(name, words, rank=ranks[name])
                send(processes[name], signal.SIGKILL)
        return stopped

    def _idle(self, missing: Mapping[str, int], suspects: Sequence[int]) -> set[str]:
        """Of those that are suspected, and are on this host, the ones that have computed nothing for a while."""
        found, now = set(), time.time()
        for name, rank in missing.items():
            process = self._process(name)
            if rank not in suspects or process is None:
                continue
            spent, since = self._named.setdefault(name, (computed(process), now))
            if now - since > _DOUBT_SECONDS:
                if computed(process) - spent < _IDLE * (now - since):
                    found.add(name)
                self._named[name] = computed(process), now
        return found

    def _process(self, name: str) -> psutil.Process | None:
        """Of a worker on this host that runs and has said so."""
        pid = self.board.pid(name) if self._is_running(name) else None
        if pid is None:
            return None
        with suppress(psutil.Error):
            return psutil.Process(pid)
        return None

    def _is_running(self, name: str) -> bool:
        """Whether it does, on this host."""
        return self.crew.is_here(name) and not self.crew.has_ended(name)
