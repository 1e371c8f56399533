"""Fleet: the workers of all hosts as the host that leads sees them: its own, and what the others say of theirs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.run.elastic.board import Board
from meshwright.run.elastic.crew import Crew, Place
from meshwright.run.elastic.homes import Home, Term, claim
from meshwright.run.failure import Failure, Nearness
from meshwright.spec import codec
from meshwright.spec.errors import ExitCode, Problem

_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a host says of the workers that it has `started`, and how those ended that have: None where that was well.

    `end` is its end of the connection by which the host that leads knows that it is there.
    """

    home: Home
    name: str
    end: str
    started: tuple[str, ...] = ()
    ended: Mapping[str, Failure | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a host is to do: workers that it is to `start`, and to `kill`."""

    start: tuple[str, ...] = ()
    kill: tuple[str, ...] = ()


class Fleet(Crew):
    """Starts workers by name, each on the host of its place, and knows which have ended, and with which host.

    `places[i]` is where place i of the run is, `known` are workers that were started before this host led, and `term`
    is the one in which it leads.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        board: Board,
        arguments: Sequence[str],
        places: Sequence[Place],
        own: Crew,
        host: int,
        term: Term,
        known: Sequence[str] = (),
    ) -> None:
        super().__init__(run_dir, board=board, arguments=arguments)
        self._agents = own.agents
        self._places, self._host, self._term = tuple(places), host, term
        self._begun = {name for name in known if self._is_far(name)}
        self._told: dict[int, Told] = {}
        self._orders: dict[int, Orders] = {}
        self._lost: dict[str, str] = {}
        self._unclaimed, self._looked = False, 0.0
        self._gone_hosts: dict[int, str] = {}

    def look(self) -> None:
        """Which hosts are there, which have come and which are lost, and what they say."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        assert self.board.server is not None, "the host that leads keeps the board"
        ends = self.board.server.guests
        for host in {place.host for place in self._places} - {self._host}:
            text = self.board.told(f"host/{host}")
            now = None if text is None else codec.decode(Told, json.loads(text), f"host {host}")
            before = self._told.get(host)
            if (before is not None and (now is None or now.end != before.end or before.end not in ends)) or (
                before is None and now is None and host not in self._gone_hosts and not self._answers(host)
            ):
                self._lose(host)
            if now is not None and now.end in ends:
                self._told[host] = now
                self._gone_hosts.pop(host, None)
                self._order(host, kill=tuple(name for name in now.started if name in self._lost))

    @property
    def is_whole(self) -> bool:
        """Whether all hosts are there."""
        return {place.host for place in self._places} == {self._host, *self._told}

    @property
    def others(self) -> tuple[int, ...]:
        """Hosts that are there beside this one."""
        return tuple(sorted(self._told))

    def holds(self) -> bool:
        """Whether this host still leads, which another one may since hosts were lost."""
        if self._unclaimed:
            term = Term(number=self._term.number + 1, home=self._term.home, digest=self._term.digest)
            if not claim(self._run_dir, term):
                return False
            self._term, self._unclaimed = term, False
            self.board.lead(term.number)
        return True

    @property
    def homes(self) -> tuple[Home, ...]:
        return (self.board.home, *(self._told[host].home for host in self.others))

    def place(self, name: str) -> Place:
        return self._places[int(name.partition(".")[0])]

    def can_start(self, name: str) -> bool:
        return not self._is_far(name) or self.place(name).host in self._told

    def start(self, name: str) -> None:
        if not self._is_far(name):
            if name not in self._agents:
                super().start(name)
            return
        self._begun.add(name)
        self._order(self.place(name).host, start=(name,))

    @property
    def names(self) -> tuple[str, ...]:
        told = (name for one in self._told.values() for name in one.started)
        return tuple(dict.fromkeys((*self._agents, *sorted(self._begun), *told)))

    def has_ended(self, name: str) -> bool:
        if not self._is_far(name):
            return name not in self._agents or super().has_ended(name)
        return name in self._lost or name in self._of(name)

    def failure(self, name: str, *, rank: int) -> Failure | None:
        if name in self._agents:
            return super().failure(name, rank=rank)
        if name in self._lost or not self._is_far(name):
            what = (Problem(what=self._lost.get(name, f"node {self._host} was lost")),)
            return Failure(rank=rank, nearness=Nearness.KILLED, exit_code=int(ExitCode.WORKER), problems=what)
        found = self._of(name).get(name)
        return None if found is None else replace(found, rank=rank)

    def kill(self, name: str) -> None:
        if self._is_far(name):
            self._order(self.place(name).host, kill=(name,))
        else:
            super().kill(name)

    def end_stopped(self, name: str, *, pid: int, late: bool) -> bool:
        if not self._is_far(name):
            return super().end_stopped(name, pid=pid, late=late)
        if late:
            self._order(self.place(name).host, kill=(name,))
        return late

    def failures(self, ranks: Mapping[str, int]) -> dict[int, ProcessFailure]:
        return super().failures({name: rank for name, rank in ranks.items() if name in self._agents})

    def _is_far(self, name: str) -> bool:
        return self.place(name).host != self._host

    def _of(self, name: str) -> Mapping[str, Failure | None]:
        told = self._told.get(self.place(name).host)
        return {} if told is None else told.ended

    def _order(self, host: int, *, start: tuple[str, ...] = (), kill: tuple[str, ...] = ()) -> None:
        before = self._orders.get(host, Orders())
        now = Orders(
            start=tuple(dict.fromkeys((*before.start, *start))), kill=tuple(dict.fromkeys((*before.kill, *kill)))
        )
        if now != before:
            self._orders[host] = now
            self.board.tell(f"orders/{host}", json.dumps(codec.encode(now)))

    def _lose(self, host: int) -> None:
        """Its workers are lost with it, whether they run or not; a host that comes back has others."""
        told = self._told.pop(host, None)
        label = f"node {host}" if told is None else f"node {host} ({told.name})"
        self._gone_hosts[host] = label
        names = {name for name in self._begun if self.place(name).host == host} | set(told.started if told else ())
        for name in names:
            self._lost.setdefault(name, f"{label} was lost")
        self._orders.pop(host, None)
        self.board.tell(f"orders/{host}", json.dumps(codec.encode(Orders())))
        self._unclaimed = True

    def _answers(self, host: int) -> bool:
        """Whether a host that has not spoken to this one since it leads may still do so."""
        home = next((home for home in self.board.homes if home.host == host), None)
        return home is not None and home.answers
