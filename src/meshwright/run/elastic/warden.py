"""Warden: decides who trains. It sees workers end, hears from those who lost them, and says who goes on, and from what.

Nothing here trains or is waited for by a step: while all is well it only looks.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.cost.copies import left_of
from meshwright.cost.moved import unfit
from meshwright.run.elastic.board import Board, Epoch, Key, Left, named
from meshwright.run.elastic.crew import Crew
from meshwright.run.elastic.seats import origins, seated, waiting, wanted
from meshwright.run.elastic.templates import Templates
from meshwright.run.failure import Failure, Nearness
from meshwright.run.files import load_design
from meshwright.spec import codec
from meshwright.spec.job import ElasticSpec
from meshwright.spec.plan import Plan
from meshwright.train.checkpoint import newest

_FRUITLESS = 3  # epochs in a row that ended for a lost connection, all of their workers alive, without a step
_HUNG = "did not come to where the others waited: hung or stopped"


def epochs_path(run_dir: Path) -> Path:
    """One line for each time that the ranks of a run changed: who, by which design, why, and from where on."""
    return run_dir / "elastic" / "epochs.jsonl"


@dataclass(slots=True, kw_only=True)
class Warden:
    """The membership of one run, which begins with `epoch`. Members wait `patience_seconds` for each other."""

    run_dir: Path
    board: Board
    crew: Crew
    templates: Templates
    spec: ElasticSpec
    patience_seconds: float
    epoch: Epoch
    replaces: bool = True
    over: str | None = None
    noticed: float | None = None
    furthest: int = 0
    fruitless: int = 0
    hung: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    wanted: list[str] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        """The workers of the first epoch are on their way."""
        self._make(self.epoch)
        for name in self.epoch.members:
            self.crew.start(name)

    def look(self) -> bool:
        """All that there is to decide is decided; whether workers are still to be looked after. Call it often."""
        # Looked at once: a worker that ends meanwhile is neither here nor there.
        members, ended = self.epoch.members, {name for name in self.epoch.members if self.crew.has_ended(name)}
        if self.over is not None or len(ended) == len(members):
            return self._end()
        gone = self._gone(ended)
        told = {name: self.board.left(self.epoch.number, name) for name in members}
        left = {name: one for name, one in told.items() if one is not None}
        if not gone and not left:
            self._start_wanted()
            self._take_in()
            return True
        self.noticed = self.noticed or time.time()
        if gone or any(one.error for one in left.values()):
            self.board.break_up(self.epoch.number)
        missing = [name for name in members if name not in left and name not in ended]
        self._end_hung(missing, list(left.values()))
        if not missing:
            self._form(gone, left)
        return True

    @property
    def failures(self) -> dict[int, ProcessFailure]:
        """How the last ranks failed; nothing where the run has ended well."""
        return {} if self.over == "" else self.crew.failures(self.ranks)

    def _end(self) -> bool:
        running = [name for name in self.crew.names if not self.crew.has_ended(name)]
        for name in running:
            if name not in self.epoch.members:
                self.crew.kill(name)
        return bool(running)

    def _gone(self, ended: Collection[str]) -> dict[str, Failure]:
        found = {name: self.crew.failure(name, rank=rank) for name, rank in self.ranks.items() if name in ended}
        return {name: failure for name, failure in found.items() if failure is not None}

    def _ready(self) -> list[str]:
        """Workers that are in no epoch and could be in the next."""
        others = (name for name in self.crew.names if name not in self.epoch.members)
        return [name for name in others if not self.crew.has_ended(name) and self.board.is_ready(name)]

    def _take_in(self) -> None:
        """The members are to leave after a step when there are others to go on with, of learners enough for another."""
        ready = len(self._ready()) >= self.templates.each
        if self.replaces and ready and not self.board.is_change_asked(self.epoch.number):
            self.board.ask_change(self.epoch.number)

    def _end_hung(self, missing: Sequence[str], left: Sequence[Left]) -> None:
        """Workers that the others waited for too long are ended: at once where they are stopped."""
        waited = any(one.waiting is not None and one.waiting.timed_out for one in left)
        late = time.time() - (self.noticed or time.time()) > self.patience_seconds
        for name in missing:
            pid = self.board.pid(name)
            if pid is not None and left and (late or (waited and _is_stopped(pid))):
                self.hung.add(name)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _form(self, gone: Mapping[str, Failure], left: Mapping[str, Left]) -> None:
        """The next epoch is there: of those who left the last one, and of those who are ready; or there is none."""
        survivors = [name for name in self.epoch.members if name in left]
        own = [failure for failure in gone.values() if failure.nearness is Nearness.OWN]
        if own:
            self._give_up(own[0].problems[0].what)
        elif len(survivors) + len(gone) < len(self.epoch.members):
            self._give_up("")  # one has ended well: there is nothing left to do
        elif self._is_fruitless(gone, left):
            self._give_up("ranks lose contact with each other again and again, all of them alive")
        else:
            self._replace(gone)
            self._go_on(survivors, gone, left)

    def _go_on(self, survivors: Sequence[str], gone: Mapping[str, Failure], left: Mapping[str, Left]) -> None:
        before = _plan(self.epoch)
        for others in (self._ready() if self.replaces else [], list[str]()):
            count = len(survivors) + len(others)
            design = self.templates.of(count) if survivors and count >= self.spec.min_ranks else None
            if design is not None:
                now = load_design(design).plan
                members = seated(now, before=before, had=self.epoch.members, left=survivors, others=others)
                epoch = Epoch(
                    number=self.epoch.number + 1,
                    members=members,
                    design=str(design),
                    why=self._why(gone, left, members=members),
                    since=self.noticed or time.time(),
                    lost=bool(gone),
                    pause_at=self.board.pause_at,
                    screen=self.epoch.screen,
                )
                self._make(self._with_source(epoch, left))
                return
        self._give_up(f"{len(survivors)} of {len(self.epoch.members)} ranks are left, too few to go on")

    def _make(self, epoch: Epoch) -> None:
        self.board.make(epoch)
        self.epoch, self.noticed = epoch, None
        self.hung.clear()
        self.known.update(epoch.members)
        path, plan = epochs_path(self.run_dir), _plan(epoch)
        self.ranks = {name: plan.rank_on(place) for place, name in enumerate(epoch.members)}
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"at": time.time(), "ranks": len(epoch.members), "plan": plan.digest(), **codec.encode(epoch)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _give_up(self, why: str) -> None:
        """Nobody goes on; where `why` is empty because the run has ended."""
        self.over = why
        self.board.make(replace(self.epoch, number=self.epoch.number + 1, members=(), why=why))

    def _is_fruitless(self, gone: Mapping[str, Failure], left: Mapping[str, Left]) -> bool:
        """Whether workers that are all alive lose each other time and again where they stand."""
        furthest = max((one.step for one in left.values()), default=0)
        stands = not gone and furthest <= self.furthest and any(one.error for one in left.values())
        self.fruitless = self.fruitless + 1 if stands else 0
        self.furthest = max(furthest, self.furthest)
        return self.fruitless > _FRUITLESS

    def _replace(self, gone: Mapping[str, Failure]) -> None:
        """A worker is wanted for each that was lost, unless its place was filled too often."""
        for name in gone:
            place, times = map(int, name.split("."))
            if times < self.spec.replacements:
                self.wanted.append(named(place, times=times + 1))

    def _start_wanted(self) -> None:
        """Not before the others train: what a process reads to begin would take the cores that they need to go on."""
        if self.replaces and self.wanted and self.board.is_at_work(self.epoch.number):
            for name in self.wanted:
                self.crew.start(name)
            self.wanted.clear()

    def _why(self, gone: Mapping[str, Failure], left: Mapping[str, Left], *, members: Sequence[str]) -> str:
        came = [name for name in members if name not in left]
        new, idle = sum(name not in self.known for name in came), waiting(members, left=left)
        told = [self._lost(name, failure) for name, failure in gone.items()]
        if not gone:
            told = [f"ranks lost contact: {one.error}" for one in left.values() if one.error][:1]
        if new:
            told.append(f"{new} started in the place of lost ones {_have(new)} come")
        if len(came) > new:
            told.append(f"{len(came) - new} that waited {_have(len(came) - new)} come")
        told += [idle] if idle else []
        return "; ".join(told) or "ranks were to change"

    def _lost(self, name: str, failure: Failure) -> str:
        if name in self.hung:
            return f"rank {failure.rank} {_HUNG}"
        return f"rank {failure.rank} was killed (signal {failure.signal_number})"

    def _with_source(self, epoch: Epoch, left: Mapping[str, Left]) -> Epoch:
        """`epoch` with the newest copy of which enough is left; as it is where only a checkpoint has all."""
        now = load_design(Path(epoch.design))
        reached = max(one.step for one in left.values())
        for key in sorted({key for one in left.values() for key in one.copies}, key=_age):
            before = self.board.epoch(key.epoch)
            design = load_design(Path(before.design))
            had = [name for name in before.members if name in left and key in left[name].copies]
            holders = [name for name in had if name in epoch.members]
            places = {
                design.plan.rank_on(before.members.index(name)): now.plan.rank_on(epoch.members.index(name))
                for name in holders
            }
            found, alive = (
                origins(now.plan, epoch.members, before=design.plan, had=before.members, holders=names)
                for names in (holders, left)
            )
            # A learner that is alive goes on as itself, from an older copy where it has not this one.
            target = wanted(now, found) if found == alive else None
            if target is not None and not unfit(left_of(design, places=places), target):
                return replace(epoch, source=key, holders=tuple(holders), undone_steps=max(reached - key.step, 0))
        saved = newest(self.run_dir / "checkpoints").checkpoint
        return replace(epoch, undone_steps=max(reached - (saved.step if saved is not None else 0), 0))


def _plan(epoch: Epoch) -> Plan:
    return load_design(Path(epoch.design)).plan


def _have(count: int) -> str:
    return "have" if count > 1 else "has"


def _age(key: Key) -> tuple[int, int]:
    """The newest first."""
    return -key.epoch, -key.number


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
