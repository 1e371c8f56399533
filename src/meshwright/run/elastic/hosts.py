"""Hosts: one host's part of an elastic run over several. One of them leads; where it is lost, the next one does.

Every host keeps a board of its own, which is used once it leads. Hosts follow each other in the order of the newest
epoch, and the run directory, which all of them see, has who leads and who was told to train.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.run.elastic.board import Board, Epoch, named
from meshwright.run.elastic.crew import Crew, Place
from meshwright.run.elastic.deputy import OVER, Deputy
from meshwright.run.elastic.epochs import of_this_launch
from meshwright.run.elastic.fleet import Fleet
from meshwright.run.elastic.homes import Home, Term, claim, newest_term
from meshwright.run.elastic.templates import Templates
from meshwright.run.elastic.warden import Warden
from meshwright.run.launch import WORKER_MODULE, agent_log, forwarding, workers_environment
from meshwright.run.outcome import read_ended
from meshwright.run.screen import Screen
from meshwright.run.workers import Asked
from meshwright.spec.errors import EnvironmentUnfit, Problem
from meshwright.spec.plan import Design

_LOOK_SECONDS = 0.02
_PAUSE = 0.05
_COMING_SECONDS = 60.0  # for all hosts to speak to the one that leads
_LEADING_SECONDS = 10.0  # for a host that answers to lead, before the next one does
_YIELDING_SECONDS = 5.0  # to a host that led and may only be cut off, as long as it takes to go on without others
_LEAVING_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a run ended on this host: `failures` of its own workers by rank, and why nobody goes on, "" where that was
    well; whether its workers were killed at once, and whether it `led` in the end."""

    failures: dict[int, ProcessFailure]
    why: str
    killed: bool
    led: bool = False


def leading(run_dir: Path, *, digest: str) -> Home | None:
    """Where the host is that leads this very run now; None where none does, and all hosts are to begin together."""
    end = time.monotonic() + _LEADING_SECONDS
    while (newest := newest_term(run_dir)) is not None and newest.digest == digest:
        if read_ended(run_dir) is not None or time.monotonic() > end:
            return None
        if newest.home.answers:
            return newest.home
        time.sleep(_PAUSE)
    return None


@dataclass(slots=True, kw_only=True)
class Host:
    """Host `number`, called `name`, of those that `places` lie on: it speaks from `address`, over `interface`, to those
    who know `word`."""

    design: Design
    run_dir: Path
    number: int
    name: str
    address: str
    interface: str
    places: tuple[Place, ...]
    digest: str
    arguments: tuple[str, ...]
    word: str = field(repr=False)
    say: Callable[[str], None]
    own: Board = field(init=False)
    crew: Crew = field(init=False)
    term: int = 0
    homes: tuple[Home, ...] = ()

    def __post_init__(self) -> None:
        self.own = Board.host(address=self.address, host=self.number, word=self.word, say=self.say)
        self.crew = Crew(self.run_dir, board=self.own, arguments=(*self.arguments, "--several-hosts"))

    @property
    def home(self) -> Home:
        return self.own.home

    def begin(self, homes: Sequence[Home]) -> Finished:
        """The run has ended, which all hosts at `homes` begin together; the first of them leads."""
        self.homes = tuple(homes)
        return self._train(homes[0] if self.number != homes[0].host else None)

    def come_back(self, to: Home) -> Finished:
        """The run has ended, which others are training; this host was taken in."""
        self.homes = (to, self.home)
        return self._train(to)

    def _train(self, to: Home | None) -> Finished:
        count = sum(place.host == self.number for place in self.places)
        with (
            workers_environment(count, interface=self.interface, word=self.word),
            agent_log(Screen.NORMAL),
            forwarding(self.say, module=WORKER_MODULE) as asked,
        ):
            board = self._follow_at(to) if to is not None else None
            if board is None:
                return self._lead(self._begun(), asked)
            while True:
                ended = self._follow(board, asked)
                if ended is not None:
                    return ended
                board = self._next(board)
                if board is self.own:
                    return self._lead(self._taken_over(), asked)

    def _begun(self) -> Warden:
        """Of a run that this host leads from its beginning, once all hosts are there."""
        before = newest_term(self.run_dir)
        self._claim(1 if before is None else before.number + 1)
        fleet = self._fleet(())
        self.own.lead(self.term)
        end = time.monotonic() + _COMING_SECONDS
        while not fleet.is_whole:
            if time.monotonic() > end:
                raise EnvironmentUnfit(Problem(what=f"not all nodes came within {_COMING_SECONDS:g} s", where="board"))
            fleet.look()
            time.sleep(_LOOK_SECONDS)
        templates = Templates(self.design, self.run_dir)
        warden = self._warden(fleet, self._first(fleet), templates)
        warden.begin()
        templates.start()
        return warden

    def _first(self, fleet: Fleet) -> Epoch:
        members = tuple(named(place, times=0) for place in range(len(self.places)))
        return Epoch(number=0, members=members, design=str(self.run_dir / "design.json"), homes=fleet.homes)

    def _taken_over(self) -> Warden:
        """Of a run that another host led."""
        before = of_this_launch(self.run_dir)
        known = [name for epoch in before for name in epoch.members]
        self.own.homes = (self.home, *(home for home in self.homes if home.host != self.number))
        templates = Templates(self.design, self.run_dir)
        warden = self._warden(self._fleet(known), before[-1], templates)
        warden.take_over(before, places=len(self.places))
        self.own.lead(self.term)
        templates.look_ahead()
        return warden

    def _fleet(self, known: Sequence[str]) -> Fleet:
        self.own.homes = (self.home, *(home for home in self.homes if home.host != self.number))
        return Fleet(
            self.run_dir,
            board=self.own,
            arguments=(*self.arguments, "--several-hosts"),
            places=self.places,
            own=self.crew,
            host=self.number,
            term=Term(number=self.term, home=self.home, digest=self.digest),
            known=known,
        )

    def _warden(self, fleet: Fleet, epoch: Epoch, templates: Templates) -> Warden:
        return Warden(
            run_dir=self.run_dir,
            board=self.own,
            crew=fleet,
            templates=templates,
            spec=self.design.job.elastic,
            patience_seconds=self.design.job.peer_timeout_seconds,
            epoch=epoch,
        )

    def _lead(self, warden: Warden, asked: Asked) -> Finished:
        """The run has ended, and the other hosts know it."""
        assert isinstance(warden.crew, Fleet), "hosts have workers elsewhere"
        try:
            while warden.look():
                warden.replaces = not asked.once
                time.sleep(warden.pause_seconds)
        except dist.DistError:
            what = f"node {self.number} ({self.name}) leads and has lost its own network"
            raise EnvironmentUnfit(Problem(what=what, where=str(self.home))) from None
        self.own.tell(OVER, warden.over or "")
        end = time.monotonic() + _LEAVING_SECONDS
        while warden.crew.others and time.monotonic() < end:
            warden.crew.look()
            time.sleep(_LOOK_SECONDS)
        return Finished(failures=warden.failures, why=warden.over or "", killed=asked.at_once, led=True)

    def _follow(self, board: Board, asked: Asked) -> Finished | None:
        """How the run ended; None where the host that leads was lost."""
        deputy = Deputy(board=board, crew=self.crew, home=self.home, name=self.name)
        self.crew.board, self.crew.successors = board, self.homes
        try:
            while deputy.look() or not self._is_quiet():
                time.sleep(_LOOK_SECONDS)
            why = board.told(OVER) or ""
        except dist.DistError:
            if not self._is_quiet() or read_ended(self.run_dir) is None:
                return None
            why = ""
        return Finished(failures=self._failures() if why else {}, why=why, killed=asked.at_once)

    def _is_quiet(self) -> bool:
        return all(self.crew.has_ended(name) for name in self.crew.names)

    def _failures(self) -> dict[int, ProcessFailure]:
        epoch = of_this_launch(self.run_dir)[-1]
        return self.crew.failures({name: rank for rank, name in enumerate(epoch.members) if name in self.crew.names})

    def _next(self, before: Board) -> Board:
        """The board of the host that leads after the one of `before` was lost: this one's own where it is to lead.

        Raises EnvironmentUnfit where this host is cut off from the one that does.
        """
        lost, self.term = before.home, max(before.term, self.term)
        if not self.crew.names:
            fix = "start it again, as all nodes where none trains"
            raise EnvironmentUnfit(Problem(what="the node that led was lost before training began", fix=fix))
        self.homes = of_this_launch(self.run_dir)[-1].homes
        known = (*(home for home in self.homes if home not in (lost, self.home)), self.home)
        order = [home for home in self.homes if home in known] + [home for home in known if home not in self.homes]
        began = time.monotonic()
        due = began + (0.0 if lost.is_gone else _YIELDING_SECONDS)
        while time.monotonic() < began + _COMING_SECONDS:
            late = time.monotonic() > began + _LEADING_SECONDS
            for home in order:
                if home == self.home:
                    if time.monotonic() >= due and self._are_enough(order) and self._claim(self.term + 1):
                        return self.own
                elif home.answers:
                    found = self._at(home)
                    if found is not None and found.term > self.term:
                        return found
                    if not late:
                        break
            time.sleep(_PAUSE)
        what = f"node {self.number} ({self.name}) lost contact with the node that leads"
        raise EnvironmentUnfit(Problem(what=what, where=str(lost), fix="start it again: the others take it in"))

    def _are_enough(self, homes: Sequence[Home]) -> bool:
        """Whether the hosts that this one reaches could go on: one that is cut off leaves it to the others."""
        there = {self.number, *(home.host for home in homes if home != self.home and home.answers)}
        return sum(place.host in there for place in self.places) >= self.design.job.elastic.min_ranks

    def _claim(self, number: int) -> bool:
        if not claim(self.run_dir, Term(number=number, home=self.home, digest=self.digest)):
            return False
        self.term = number
        return True

    def _follow_at(self, home: Home) -> Board:
        """The board at `home`, once its host leads."""
        end = time.monotonic() + _COMING_SECONDS
        while time.monotonic() < end:
            found = self._at(home)
            if found is not None and found.term:
                return found
            time.sleep(_PAUSE)
        raise EnvironmentUnfit(Problem(what="the node that is to lead does not", where=str(home)))

    def _at(self, home: Home) -> Board | None:
        try:
            return self.own.another([home])
        except dist.DistError:
            return None
