"""Lines: the connections of a worker to the others of its epoch, shut down as soon as one of them is known to be lost.

Process groups keep their connections until nothing refers to them any more, and who waits hears of a loss only from the
rank that it waits for: without this, ranks would leave one after another, and none that waits for a rank to come.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch.distributed as dist

from meshwright.run.elastic.board import Board, Epoch

_LOOK_SECONDS = 0.05


class Lines:
    """Those of the worker `name` in `epoch`. Its groups are formed through `store`, which is one of them."""

    def __init__(self, board: Board, epoch: Epoch, *, name: str) -> None:
        before = _ends_at(board.port)
        own = Board.at(board.port)
        self.store = dist.PrefixStore(f"epoch/{epoch.number}", own.store)
        self._to_store = _ends_at(board.port) - before
        self._epoch, self._port = epoch, board.port
        self._others = [pid for member in epoch.members if member != name and (pid := board.pid(member)) is not None]

    def hang_up(self) -> None:
        """All of them are shut down: whatever waits at either end fails now."""
        theirs = {end.laddr for process in self._others for end in _connections(process)}
        for own in _connections(os.getpid()):
            if own.raddr in theirs or own.laddr in self._to_store:
                with suppress(OSError), socket.socket(fileno=os.dup(own.fd)) as end:
                    end.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """They are shut down once the board says that the epoch is broken."""
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stop,), name="lines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _watch(self, stop: threading.Event) -> None:
        board = Board.at(self._port)
        while not stop.wait(_LOOK_SECONDS):
            if board.is_broken(self._epoch.number):
                self.hang_up()
                return


def _ends_at(port: int) -> set[Any]:
    """This process's ends of its connections to a port."""
    return {one.laddr for one in _connections(os.getpid()) if one.raddr and one.raddr.port == port}


def _connections(process: int) -> list[Any]:
    """Of a process that has ended there are none."""
    try:
        return list(psutil.Process(process).net_connections(kind="tcp"))
    except psutil.Error:
        return []
