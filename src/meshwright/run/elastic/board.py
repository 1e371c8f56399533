"""Board: what the launcher and the workers of an elastic run tell each other, in values that the launcher keeps.

The workers of one epoch train together by one design. Only the launcher makes epochs; a worker that has left one never
comes back into it. A worker is named by its place and how often that was filled before: `2.0`, then `2.1`.

Over several hosts each has a board, and that of the host that leads is used. Whoever loses it turns to the others until
one of them leads, and tells it again what it had told the one before.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from meshwright.run.elastic.homes import Home
from meshwright.run.elastic.keys import KeyServer, KeyStore
from meshwright.run.rendezvous import LOOPBACK_ADDRESS
from meshwright.run.waiting import Waiting
from meshwright.spec import codec
from meshwright.spec.json_text import parse_json

T = TypeVar("T")

_PAUSES = 0.0005, 0.005  # between two looks: the first, which grow to the last
_TURNING_SECONDS = 0.05
_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A copy of the state: the `number`-th of `epoch`, of the state after `step`."""

    epoch: int
    number: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """`members` train by the design in the file `design`, in the order of the places of its plan.

    They go on from the copy `source`, which `holders` have, or where that is None from the newest checkpoint; `why`
    ranks have changed, which was known `since` then, whether one was `lost`, and `undone_steps` that are done again.
    The run pauses at `pause_at`. An epoch without members is none: the run has ended, or cannot go on and says `why`.
    `homes` are the boards of all hosts that are there, that of the one that leads first.
    """

    number: int
    members: tuple[str, ...]
    design: str
    source: Key | None = None
    holders: tuple[str, ...] = ()
    why: str = ""
    since: float = 0.0
    lost: bool = False
    undone_steps: int = 0
    pause_at: int | None = None
    screen: bool = True
    homes: tuple[Home, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A worker has left its epoch, after `step`, and has `copies`: because it lost another one, in `waiting`, which it
    was told by `error`; or because it was asked to."""

    step: int
    copies: tuple[Key, ...]
    error: str = ""
    waiting: Waiting | None = None


class Board:
    """One side's view of it. Nothing here waits for a worker that is gone.

    It is at `home`, and may be at any of `homes` later; `term` counts the hosts that have led, and `turns` how often
    this side turned to another one. `server` is there where this process keeps it. Raises DistError where none of them
    leads, or knows `word`.
    """

    def __init__(self, store: KeyStore, homes: Sequence[Home], *, word: str, server: KeyServer | None = None) -> None:
        self.store, self.homes, self.home, self.term, self.turns = store, tuple(homes), homes[0], 0, 0
        self.server, self._word = server, word
        self._own: dict[str, str] = {}
        self._newest = 0
        self._expected: tuple[str, Epoch | None] = ("", None)

    @classmethod
    def host(cls, *, word: str, say: Callable[[str], None], address: str = LOOPBACK_ADDRESS, host: int = 0) -> Board:
        """A new board, which this process keeps, on a port of this machine that the system chooses, for those who know
        `word`; `say` is told of others that come."""
        server = KeyServer(address, word=word, say=say)
        server.start()
        store = KeyStore(address, server.port, word=word, timeout=_PATIENCE)
        found = cls(store, [Home(host=host, address=address, port=server.port)], word=word, server=server)
        weakref.finalize(found, server.close)
        return found

    @classmethod
    def at(cls, homes: Sequence[Home], *, word: str) -> Board:
        """The board that another process keeps, at the first of `homes`; the others may lead after it."""
        home = homes[0]
        store = KeyStore(home.address, home.port, word=word, timeout=_PATIENCE)
        store.notice_loss()
        found = cls(store, homes, word=word)
        found.term = found.leads
        return found

    def another(self, homes: Sequence[Home]) -> Board:
        """The same run's board at `homes`, over a connection of its own."""
        return Board.at(homes, word=self._word)

    @property
    def leads(self) -> int:
        """The term in which the host of this board leads; 0 before it does."""
        return int(self.store.find("lead")[0] or 0)

    def lead(self, term: int) -> None:
        """The host of this board leads from now on, and all that others need to know is here."""
        self.term = term
        self.store.set("lead", str(term))

    def register(self, name: str, *, pid: int) -> None:
        """The worker `name` is this process."""
        self.tell(f"pid/{name}", str(pid))

    def pid(self, name: str) -> int | None:
        """None before the worker has said so."""
        found = self.told(f"pid/{name}")
        return None if found is None else int(found)

    def stand_ready(self, name: str) -> None:
        """The worker has all that it needs to join."""
        self.tell(f"ready/{name}", "")

    def is_ready(self, name: str) -> bool:
        return self.has(f"ready/{name}")

    def make(self, epoch: Epoch) -> None:
        """`epoch` is there, and each of its members knows it."""
        self._tell(f"epoch/{epoch.number}", epoch)
        for name in epoch.members:
            self.tell(f"joined/{name}", str(epoch.number))

    def first_epoch(self, name: str) -> Epoch:
        """The epoch that the worker comes into, once there is one."""
        key = f"joined/{name}"
        self._wait(lambda: self.has(key))
        return self.epoch(int(self.told(key) or 0))

    def epoch(self, number: int) -> Epoch:
        """Epoch `number`, once it is there."""
        self._wait(lambda: self.has(f"epoch/{number}"))
        found = self._told(f"epoch/{number}", Epoch)
        if found.homes and number >= self._newest:
            self.homes, self._newest = found.homes, number
        return found

    def arrive(self, epoch: Epoch, name: str) -> bool:
        """Whether all members have come into `epoch`, once that is known: they have not where it is broken."""
        self.tell(f"here/{epoch.number}/{name}", "")
        here = [f"here/{epoch.number}/{member}" for member in epoch.members]
        self._wait(lambda: self.is_broken(epoch.number) or self.has(*here))
        return self.has(*here)

    def came(self, epoch: Epoch) -> set[str]:
        """Members that have come into `epoch`, and wait for the others or build with them."""
        return {name for name in epoch.members if self.has(f"here/{epoch.number}/{name}")}

    def break_up(self, number: int) -> None:
        """Nobody is to wait for the others of epoch `number` any more."""
        self.tell(f"broken/{number}", "")

    def is_broken(self, number: int) -> bool:
        return self.has(f"broken/{number}")

    def expect(self, epoch: Epoch) -> None:
        """`epoch` comes next if those come who are on the way and all goes well: nobody is to rely on it."""
        self._tell("expected", epoch)

    @property
    def expected(self) -> Epoch | None:
        """The epoch that was expected last, which is asked for often and changes rarely."""
        return self._expected_by(self.told("expected"))

    def news(self, number: int) -> tuple[bool, Epoch | None]:
        """Whether epoch `number` is broken, and `expected`: what all who train ask for all the time, in one request."""
        broken, text = self._told_of(f"broken/{number}", "expected")
        return broken is not None, self._expected_by(text)

    def _expected_by(self, text: str | None) -> Epoch | None:
        if text is not None and text != self._expected[0]:
            self._expected = text, codec.decode(Epoch, parse_json(text), "expected")
        return self._expected[1]

    def note_at_work(self, number: int) -> None:
        """The members of epoch `number` train."""
        self.tell(f"work/{number}", "")

    def is_at_work(self, number: int) -> bool:
        return self.has(f"work/{number}")

    def ask_change(self, number: int) -> None:
        """The members of epoch `number` are to leave it after a step."""
        self.tell(f"change/{number}", "")

    def is_change_asked(self, number: int) -> bool:
        return self.has(f"change/{number}")

    def leave(self, number: int, name: str, left: Left) -> None:
        self._tell(f"left/{number}/{name}", left)

    def left(self, number: int, name: str) -> Left | None:
        key = f"left/{number}/{name}"
        return self._told(key, Left) if self.has(key) else None

    def note_pause(self, step: int) -> None:
        """The run pauses at `step`, whoever trains it."""
        self.tell("pause", str(step))

    @property
    def pause_at(self) -> int | None:
        found = self.told("pause")
        return None if found is None else int(found)

    def has(self, *keys: str) -> bool:
        """Whether all of them were told."""
        return self._ask(lambda store: store.check(keys))

    def tell(self, key: str, value: str) -> None:
        self._own[key] = value
        self._ask(lambda store: store.set(key, value))

    def told(self, key: str) -> str | None:
        """None before anybody has."""
        return self._told_of(key)[0]

    def _told_of(self, *keys: str) -> tuple[str | None, ...]:
        """What was told under each of them, asked at once."""
        found = self._ask(lambda store: store.find(*keys))
        return tuple(None if each is None else each.decode() for each in found)

    def _tell(self, key: str, value: object) -> None:
        self.tell(key, json.dumps(codec.encode(value)))

    def _told(self, key: str, kind: type[T]) -> T:
        return codec.decode(kind, parse_json(self.told(key) or ""), key)

    def _ask(self, of: Callable[[KeyStore], T]) -> T:
        while True:
            try:
                return of(self.store)
            except dist.DistError as error:
                if len(self.homes) < 2 or not self._turn():
                    raise error

    def _turn(self) -> bool:
        """Whether a host leads that this process reaches: its board is used from here on."""
        end = time.monotonic() + _PATIENCE.total_seconds()
        while time.monotonic() < end:
            for home in self.homes:
                with suppress(dist.DistError):
                    found = self.another([home])
                    if found.term and found.term >= self.term:
                        self.store, self.home, self.term, self.turns = found.store, home, found.term, self.turns + 1
                        for key, value in self._own.items():
                            self.store.set(key, value)
                        return True
            time.sleep(_TURNING_SECONDS)
        return False

    @staticmethod
    def _wait(known: Callable[[], bool]) -> None:
        pause, longest = _PAUSES
        while not known():
            time.sleep(pause)
            pause = min(1.5 * pause, longest)


def named(place: int, *, times: int) -> str:
    """The worker that fills `place` after `times` others."""
    return f"{place}.{times}"
