"""Lines: the connections of a worker to the others of its epoch, shut down as soon as one of them is known to be lost.

Process groups keep their connections until nothing refers to them any more, and who waits hears of a loss only from the
rank that it waits for: without this, ranks would leave one after another, and none that waits for a rank to come.
Those to a rank on this machine are told by its process, those to one on another by its address.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import torch.distributed as dist

from meshwright.run.elastic.board import Board, Epoch
from meshwright.run.elastic.homes import Address, Home, connections_of, own_connections

_LOOK_SECONDS = 0.05


class Lines:
    """Those of the worker `name` in `epoch`. Its groups are formed through `store`, which is one of them."""

    def __init__(self, board: Board, epoch: Epoch, *, name: str) -> None:
        home = board.home
        before = _ends_at(home)
        own = Board.at([home])
        self.store = dist.PrefixStore(f"epoch/{epoch.number}", own.store)
        self._to_store = _ends_at(home) - before
        self._epoch, self._homes = epoch, (home, *(other for other in board.homes if other != home))
        self._others = [pid for member in epoch.members if member != name and (pid := board.pid(member)) is not None]
        self._boards = {(home.address, home.port) for home in self._homes}
        self._far = {address for address, _ in self._boards} - _own_addresses()

    def hang_up(self) -> None:
        """All of them are shut down: whatever waits at either end fails now."""
        theirs = {end.laddr for process in self._others for end in connections_of(process)}
        for own in own_connections():
            far = own.raddr.ip in self._far and own.raddr not in self._boards
            if far or own.raddr in theirs or own.laddr in self._to_store:
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
        board, expected = Board.at(self._homes), None
        while not stop.wait(_LOOK_SECONDS):
            if board.is_broken(self._epoch.number):
                self.hang_up()
                return
            before, expected = expected, board.expected
            if expected is not None and expected != before and expected.number == self._epoch.number + 1:
                with suppress(Exception):  # whoever needs it meets it again
                    look_ahead(expected)


def _ends_at(home: Home) -> set[Address]:
    """This process's ends of its connections to a board."""
    return {one.laddr for one in own_connections() if one.raddr.port == home.port}


def _own_addresses() -> set[str]:
    """Of this machine."""
    return {each.address for held in psutil.net_if_addrs().values() for each in held}
