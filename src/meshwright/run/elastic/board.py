"""Board: what the launcher and the workers of an elastic run tell each other, in a store that the launcher hosts.

The workers of one epoch train together by one design. Only the launcher makes epochs; a worker that has left one never
comes back into it. A worker is named by its place and how often that was filled before: `2.0`, then `2.1`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from meshwright.run.rendezvous import LOOPBACK_ADDRESS, loopback_store
from meshwright.run.waiting import Waiting
from meshwright.spec import codec
from meshwright.spec.json_text import parse_json

T = TypeVar("T")

_PAUSE = 0.005
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A worker has left its epoch, after `step`, and has `copies`: because it lost another one, in `waiting`, which it
    was told by `error`; or because it was asked to."""

    step: int
    copies: tuple[Key, ...]
    error: str = ""
    waiting: Waiting | None = None


class Board:
    """One side's view of the store. Nothing here waits for a worker that is gone."""

    def __init__(self, store: dist.TCPStore) -> None:
        self.store = store

    @classmethod
    def host(cls) -> Board:
        """A new board, which this process keeps, on a port of this machine that the system chooses."""
        return cls(loopback_store(timeout=_PATIENCE))

    @classmethod
    def at(cls, port: int) -> Board:
        """The board that another process of this machine keeps."""
        return cls(dist.TCPStore(LOOPBACK_ADDRESS, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE))

    @property
    def port(self) -> int:
        return int(self.store.port)

    def register(self, name: str, *, pid: int) -> None:
        """The worker `name` is this process."""
        self.store.set(f"pid/{name}", str(pid))

    def pid(self, name: str) -> int | None:
        """None before the worker has said so."""
        return int(self.store.get(f"pid/{name}")) if self.has(f"pid/{name}") else None

    def stand_ready(self, name: str) -> None:
        """The worker has all that it needs to join."""
        self.store.set(f"ready/{name}", "")

    def is_ready(self, name: str) -> bool:
        return self.has(f"ready/{name}")

    def make(self, epoch: Epoch) -> None:
        """`epoch` is there, and each of its members knows it."""
        self._tell(f"epoch/{epoch.number}", epoch)
        for name in epoch.members:
            self.store.set(f"joined/{name}", str(epoch.number))

    def first_epoch(self, name: str) -> Epoch:
        """The epoch that the worker comes into, once there is one."""
        key = f"joined/{name}"
        self._wait(lambda: self.has(key))
        return self.epoch(int(self.store.get(key)))

    def epoch(self, number: int) -> Epoch:
        """Epoch `number`, once it is there."""
        self._wait(lambda: self.has(f"epoch/{number}"))
        return self._told(f"epoch/{number}", Epoch)

    def arrive(self, epoch: Epoch, name: str) -> bool:
        """Whether all members have come into `epoch`, once that is known: they have not where it is broken."""
        self.store.set(f"here/{epoch.number}/{name}", "")
        here = [f"here/{epoch.number}/{member}" for member in epoch.members]
        self._wait(lambda: self.is_broken(epoch.number) or self.store.check(here))
        return bool(self.store.check(here))

    def break_up(self, number: int) -> None:
        """Nobody is to wait for the others of epoch `number` any more."""
        self.store.set(f"broken/{number}", "")

    def is_broken(self, number: int) -> bool:
        return self.has(f"broken/{number}")

    def note_at_work(self, number: int) -> None:
        """The members of epoch `number` train."""
        self.store.set(f"work/{number}", "")

    def is_at_work(self, number: int) -> bool:
        return self.has(f"work/{number}")

    def ask_change(self, number: int) -> None:
        """The members of epoch `number` are to leave it after a step."""
        self.store.set(f"change/{number}", "")

    def is_change_asked(self, number: int) -> bool:
        return self.has(f"change/{number}")

    def leave(self, number: int, name: str, left: Left) -> None:
        self._tell(f"left/{number}/{name}", left)

    def left(self, number: int, name: str) -> Left | None:
        key = f"left/{number}/{name}"
        return self._told(key, Left) if self.has(key) else None

    def note_pause(self, step: int) -> None:
        """The run pauses at `step`, whoever trains it."""
        self.store.set("pause", str(step))

    @property
    def pause_at(self) -> int | None:
        return int(self.store.get("pause")) if self.has("pause") else None

    def has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _tell(self, key: str, value: object) -> None:
        self.store.set(key, json.dumps(codec.encode(value)))

    def _told(self, key: str, kind: type[T]) -> T:
        return codec.decode(kind, parse_json(self.store.get(key)), key)

    @staticmethod
    def _wait(known: Callable[[], bool]) -> None:
        while not known():
            time.sleep(_PAUSE)


def named(place: int, *, times: int) -> str:
    """The worker that fills `place` after `times` others."""
    return f"{place}.{times}"
