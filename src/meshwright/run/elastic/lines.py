"""Lines: the connections of a worker to the others of its epoch, shut down as soon as one of them is known to be lost.

Process groups keep their connections until nothing refers to them any more, and who waits hears of a loss only from the
rank that it waits for: without this, ranks would leave one after another, and none that waits for a rank to come.
Those to a rank on this machine are told by its process, those to one on another by its address.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from meshwright.run.elastic.board import Board, Epoch

_LOOK_SECONDS = 0.05


class Lines:
    """Those of the worker `name` in `epoch`. Its groups are formed through `store`, which is one of them."""

    def __init__(self, board: Board, epoch: Epoch, *, name: str) -> None:
        home = board.home
        self._board, self._epoch = board, epoch
        self._homes = home, *(other for other in board.homes if other != home)
        # Kept beside what wraps it, which knows its values only while this side of it is there.
        self._own = board.another([home]).store
        self.store = dist.PrefixStore(f"epoch/{epoch.number}", self._own)
        self._others = [pid for member in epoch.members if member != name and (pid := board.pid(member)) is not None]
        self._boards = {(home.address, home.port) for home in self._homes}
        self._far = {address for address, _ in self._boards} - _own_addresses()

    def hang_up(self) -> None:
        """All of them are shut down: whatever waits at either end fails now."""
        self._own.hang_up()
        theirs = {end.laddr for process in self._others for end in connections_of(process)}
        for own in own_connections():
            far = own.raddr.ip in self._far and own.raddr not in self._boards
            if far or own.raddr in theirs:
                with suppress(OSError), socket.socket(fileno=os.dup(own.fd)) as end:
                    end.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def watched(self, *, look_ahead: Callable[[Epoch], None]) -> Iterator[None]:
        """They are shut down once the board says that the epoch is broken; the one that is to come after it is looked
        ahead to meanwhile."""
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stop, look_ahead), name="lines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _watch(self, stop: threading.Event, look_ahead: Callable[[Epoch], None]) -> None:
        board, expected = self._board.another(self._homes), None
        while not stop.wait(_LOOK_SECONDS):
            broken, now = board.news(self._epoch.number)
            if broken:
                self.hang_up()
                return
            before, expected = expected, now
            if expected is not None and expected != before and expected.number == self._epoch.number + 1:
                with suppress(Exception):  # whoever needs it meets it again
                    look_ahead(expected)


class Address(NamedTuple):
    """One side of a connection, as psutil has it."""

    ip: str
    port: int


class End(NamedTuple):
    """This process's end of a connection: its descriptor, its own address and that of the other side."""

    fd: int
    laddr: Address
    raddr: Address


def own_connections() -> list[End]:
    """Of this process, asked of its descriptors: tables of the system have those of all processes."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # one that was closed meanwhile, or that only listens
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type is socket.SOCK_STREAM:
                        own, other = Address(*one.getsockname()[:2]), Address(*one.getpeername()[:2])
                        found.append(End(int(name), own, other))
    return found


def connections_of(process: int) -> list[Any]:
    """Of another process; of one that has ended there are none."""
    try:
        return [one for one in psutil.Process(process).net_connections(kind="tcp") if one.raddr]
    except psutil.Error:
        return []


def _own_addresses() -> set[str]:
    """Of this machine."""
    return {each.address for held in psutil.net_if_addrs().values() for each in held}
