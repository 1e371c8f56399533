"""Warden: decides who trains. It sees workers end, hears from those who lost them, and says who goes on, and from what.

Nothing here trains or is waited for by a step: while all is well it only looks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.cost.learner_holdings import Origins
from meshwright.cost.moved import unfit
from meshwright.run.elastic.board import Board, Epoch, Key, Left, named
from meshwright.run.elastic.crew import Crew, Place
from meshwright.run.elastic.epochs import write
from meshwright.run.elastic.hung import Hung
from meshwright.run.elastic.outlook import Outlook
from meshwright.run.elastic.seats import origins, seated, waiting, wanted
from meshwright.run.elastic.templates import Templates
from meshwright.run.failure import Failure, Nearness
from meshwright.search import Hosts, in_order
from meshwright.spec.job import ElasticSpec
from meshwright.train.checkpoint import newest

_LOOK_SECONDS, _ASKED_SECONDS, _WAITED_FOR_SECONDS, _LEAVING_SECONDS = 0.02, 0.005, 0.002, 1.0
_NUMBER = re.compile(r"\d+")
_FRUITLESS = 3  # epochs in a row that ended for a lost connection, all of their workers alive, without a step
_TOGETHER_SECONDS = 10.0  # from the first that is ready to be taken in to the last that is waited for


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
    since_ready: float | None = None
    asked: bool = False
    furthest: int = 0
    fruitless: int = 0
    hung: Hung = field(init=False)
    local: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    wanted: list[str] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)
    outlook: Outlook = field(default_factory=Outlook)

    def __post_init__(self) -> None:
        self.hung = Hung(run_dir=self.run_dir, board=self.board, crew=self.crew, patience_seconds=self.patience_seconds)

    def begin(self) -> None:
        """The workers of the first epoch are on their way."""
        self._make(self.epoch)
        for name in self.epoch.members:
            self.crew.start(name)

    def take_over(self, before: Sequence[Epoch], *, places: int) -> None:
        """This process decides from here on: the board has what others need, and who was lost is wanted again.

        `before` are all epochs; every place below `places` had a worker, or was to have one.
        """
        for epoch in before:
            self.board.make(epoch)
        self.ranks = self.outlook.ranks(self.epoch)
        known = sorted({name for epoch in before for name in epoch.members}, key=_time)
        newest = {_place(name): name for name in known}
        here = {_place(name) for name in self.epoch.members}
        self._want(newest[place] for place in range(places) if place not in here)

    def look(self) -> bool:
        """All that there is to decide is decided; whether workers are still to be looked after. Call it often."""
        self.crew.look()
        # Looked at once: a worker that ends meanwhile is neither here nor there.
        members, ended = self.epoch.members, {name for name in self.epoch.members if self.crew.has_ended(name)}
        if self.over is not None or len(ended) == len(members):
            return self._end()
        gone = self._gone(ended)
        self._watch(gone, ended)
        told = {name: self.board.left(self.epoch.number, name) for name in members}
        left = {name: one for name, one in told.items() if one is not None}
        if not gone and not left:
            self.hung.form(self.epoch, self.ranks)
            self._start_wanted()
            self._take_in()
            return True
        self.noticed = self.noticed or time.time()
        if gone or any(one.error for one in left.values()):
            self.board.break_up(self.epoch.number)
        missing = [name for name in members if name not in left and name not in ended]
        self.hung.end({name: self.ranks[name] for name in missing}, list(left.values()), noticed=self.noticed)
        if not missing:
            self._form(gone, left)
        return True

    @property
    def pause_seconds(self) -> float:
        """Until the next look, for which members wait that have just begun to leave, or will after this step."""
        if self.noticed is not None and time.time() - self.noticed < _LEAVING_SECONDS:
            return _WAITED_FOR_SECONDS
        return _ASKED_SECONDS if self.asked and self.noticed is None else _LOOK_SECONDS

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
        """The members are to leave after a step when there are others to go on with, of learners enough for another:
        once for those of a whole host."""
        ready = self._ready() if self.replaces else []
        if len(ready) < max(self.templates.each, 1) or self.board.is_change_asked(self.epoch.number):
            return
        self.since_ready = self.since_ready or time.monotonic()
        coming = [name for name in self.crew.names if name not in (*self.epoch.members, *ready)]
        late = time.monotonic() - self.since_ready > _TOGETHER_SECONDS
        if late or all(self.crew.has_ended(name) for name in coming):
            self.board.ask_change(self.epoch.number)
            self.asked = True

    def _watch(self, gone: Mapping[str, Failure], ended: Collection[str]) -> None:
        """Who is lost is in the records of the run; who stands still is found."""
        for name, failure in gone.items():
            self.hung.note(name, self._lost(name, failure), rank=failure.rank)
        running = {name: rank for name, rank in self.ranks.items() if name not in ended}
        self.hung.watch(running, alone=len(self.ranks) == 1)

    def _form(self, gone: Mapping[str, Failure], left: Mapping[str, Left]) -> None:
        """The next epoch is there: of those who left the last one, and of those who are ready; or there is none."""
        survivors = [name for name in self.epoch.members if name in left]
        own = [failure for name, failure in gone.items() if self._is_of_all(name, failure)]
        if own:
            self._give_up(own[0].problems[0].what)
        elif len(survivors) + len(gone) < len(self.epoch.members):
            self._give_up("")  # one has ended well: there is nothing left to do
        elif self._is_fruitless(gone, left):
            self._give_up("ranks lose contact with each other again and again, all of them alive")
        else:
            self._want(gone)
            self._go_on(survivors, gone, left)

    def _is_of_all(self, name: str, failure: Failure) -> bool:
        """Whether the others would meet it too: any error but one of a rank's own memory or disk, unless another one
        has met that as well. Where there are several hosts it is theirs."""
        if failure.nearness is not Nearness.OWN:
            return False
        hosts = {self.crew.place(member).host for member in self.epoch.members}
        spot = self.crew.place(name).host if len(hosts) > 1 else _place(name)
        kind = _NUMBER.sub("", failure.problems[0].what)
        return not failure.local or self.local.setdefault(kind, spot) != spot

    def _go_on(self, survivors: Sequence[str], gone: Mapping[str, Failure], left: Mapping[str, Left]) -> None:
        for others in (self._ready() if self.replaces else [], list[str]()):
            epoch = self._next(survivors, others)
            if epoch is not None and not self.crew.holds():
                self._give_up("another host goes on without this one")
                return
            if epoch is not None:
                epoch = replace(
                    epoch,
                    why=self._why(gone, left, members=epoch.members),
                    since=self.noticed or time.time(),
                    lost=bool(gone),
                    pause_at=self.board.pause_at,
                    homes=self.crew.homes,
                )
                self._make(self._with_source(epoch, left))
                return
        self._give_up(f"{len(survivors)} of {len(self.epoch.members)} ranks are left, too few to go on")

    def _next(self, survivors: Sequence[str], others: Sequence[str]) -> Epoch | None:
        """The epoch of the `survivors` of this one with `others`; None where there is no plan for them."""
        names, hosts = self._laid([*survivors, *others])
        design = self.templates.of(hosts) if survivors and len(names) >= self.spec.min_ranks else None
        if design is None:
            return None
        epoch = Epoch(number=self.epoch.number + 1, members=tuple(names), design=str(design), screen=self.epoch.screen)
        now, before = self.outlook.plan(epoch), self.outlook.plan(self.epoch)
        members = seated(now, names, before=before, had=self.epoch.members, left=survivors)
        return replace(epoch, members=members)

    def _laid(self, names: Sequence[str]) -> tuple[list[str], Hosts]:
        """The workers in the order of the devices of a plan for their hosts, and those hosts."""
        on: dict[Place, list[str]] = {}
        for name in names:
            on.setdefault(self.crew.place(name), []).append(name)
        hosts = sorted(on, key=lambda place: (place.group, -len(on[place]), place.host))
        return [name for host in hosts for name in on[host]], in_order((host.group, len(on[host])) for host in hosts)

    def _make(self, epoch: Epoch) -> None:
        # Written first: a host that leads after this one reads there who was told what.
        write(self.run_dir, epoch, plan=self.outlook.plan(epoch).digest())
        self.board.make(epoch)
        self.epoch, self.noticed, self.since_ready, self.asked = epoch, None, None, False
        self.hung.begin()
        self.known.update(epoch.members)
        self.ranks = self.outlook.ranks(epoch)

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

    def _want(self, gone: Iterable[str]) -> None:
        """A worker is wanted for each that was lost, unless its place was filled too often."""
        for name in gone:
            if _time(name) < self.spec.replacements:
                self.wanted.append(named(_place(name), times=_time(name) + 1))

    def _start_wanted(self) -> None:
        """Not before the others train: what a process reads to begin would take the cores that they need to go on."""
        if not self.replaces or not self.board.is_at_work(self.epoch.number):
            return
        self._want(self._ended_early())
        starting = [name for name in self.wanted if self.crew.can_start(name)]
        for name in starting:
            self.crew.start(name)
            self.wanted.remove(name)
        if starting:
            self._expect()

    def _expect(self) -> None:
        """The members know what comes after this epoch once all have come who are on the way, and so does this."""
        coming = [name for name in self.crew.names if name not in self.epoch.members and not self.crew.has_ended(name)]
        epoch = self._next(self.epoch.members, coming)
        if epoch is not None:
            self.board.expect(epoch)
            self.outlook.look_ahead(self.epoch, epoch)

    def _ended_early(self) -> list[str]:
        """Workers that were to be taken in and have ended before."""
        filled = {_place(name) for name in (*self.epoch.members, *self.wanted)}
        newest = {_place(name): name for name in sorted(self.crew.names, key=_time)}
        return [name for place, name in newest.items() if place not in filled and self.crew.has_ended(name)]

    def _why(self, gone: Mapping[str, Failure], left: Mapping[str, Left], *, members: Sequence[str]) -> str:
        came = [name for name in members if name not in left]
        new, idle = sum(name not in self.known for name in came), waiting(members, left=left)
        told = list(dict.fromkeys(self._lost(name, failure) for name, failure in gone.items()))
        if not gone:
            told = [f"ranks lost contact: {one.error}" for one in left.values() if one.error][:1]
        if new:
            told.append(f"{new} started in the place of lost ones {_have(new)} come")
        if len(came) > new:
            told.append(f"{len(came) - new} that waited {_have(len(came) - new)} come")
        told += [idle] if idle else []
        return "; ".join(told) or "ranks were to change"

    def _lost(self, name: str, failure: Failure) -> str:
        if name in self.hung.found:
            return self.hung.found[name]
        if not failure.signal_number:
            what = failure.problems[0].what
            return f"rank {failure.rank} failed: {what}" if failure.local else what
        return f"rank {failure.rank} was killed (signal {failure.signal_number})"

    def _with_source(self, epoch: Epoch, left: Mapping[str, Left]) -> Epoch:
        """`epoch` with the newest copy of which enough is left; as it is where only a checkpoint has all."""
        now = self.outlook.design(epoch)
        reached = max(one.step for one in left.values())
        for key in sorted({key for one in left.values() for key in one.copies}, key=_age):
            before = self.board.epoch(key.epoch)
            plan = self.outlook.plan(before)
            had = [name for name in before.members if name in left and key in left[name].copies]
            holders = [name for name in had if name in epoch.members]
            found, alive = (
                origins(now.plan, epoch.members, before=plan, had=before.members, holders=names)
                for names in (holders, left)
            )
            # A learner that is alive goes on as itself, from an older copy where it has not this one.
            if found == alive and self._is_enough(before, epoch, holders=holders, found=found):
                return replace(epoch, source=key, holders=tuple(holders), undone_steps=max(reached - key.step, 0))
        saved = newest(self.run_dir / "checkpoints").checkpoint
        return replace(epoch, undone_steps=max(reached - (saved.step if saved is not None else 0), 0))

    def _is_enough(self, before: Epoch, epoch: Epoch, *, holders: Sequence[str], found: Origins) -> bool:
        """Whether `epoch` can go on from what `holders` have of a copy of the one `before`."""
        way = self.outlook.way(before, epoch, holders=holders)
        if way is not None:
            return not way.problems
        target = wanted(self.outlook.design(epoch), found)
        return target is not None and not unfit(self.outlook.left(before, epoch, holders=holders), target)


def _place(name: str) -> int:
    return int(name.partition(".")[0])


def _time(name: str) -> int:
    """How often its place was filled before it."""
    return int(name.partition(".")[2])


def _have(count: int) -> str:
    return "have" if count > 1 else "has"


def _age(key: Key) -> tuple[int, int]:
    """The newest first."""
    return -key.epoch, -key.number
