"""Port: what this process listens at, served by a thread of its own; a guarded one lets in who knows a word.

Whoever does not is refused within seconds, whatever it sends or keeps back, and told of in a line.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from abc import ABC, abstractmethod
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import Callable
from contextlib import suppress

from meshwright.run.handshake import PATIENCE_SECONDS, Refused, Seal, admitted

BACKLOG = 1024
_MOST_AT_THE_DOOR = 512  # connections whose handshake is under way: of more, the one that has waited longest goes
_MOST_TOLD = 16
_MOST_STRANGERS = 64


class Port(threading.Thread, ABC):
    """All that comes to `listening` is served."""

    def __init__(self, listening: socket.socket, *, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._listening = listening
        self.port: int = listening.getsockname()[1]
        self._serving: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def run(self) -> None:
        with suppress(OSError, asyncio.CancelledError):
            asyncio.run(self._serve())

    def close(self) -> None:
        """Nobody is served any more, and all connections end."""
        if self._serving is not None:
            loop, task = self._serving
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(task.cancel)

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._serving = asyncio.get_running_loop(), task
        server = await asyncio.start_server(self._serve_one, sock=self._listening, backlog=BACKLOG)
        async with server:
            await server.serve_forever()

    async def _serve_one(self, reader: Reader, writer: Writer) -> None:
        with suppress(asyncio.CancelledError):  # by `close`, after which this ends all the same
            await self._greet(reader, writer)

    @abstractmethod
    async def _greet(self, reader: Reader, writer: Writer) -> None:
        """A connection has been served to its end."""


class Guarded(Port):
    """Lets in who knows `word`, which is used here for `purpose` alone; `say` is told of the first that are refused.

    `strangers` are what those said who owned not to know it: nothing of it is known to be true.
    """

    def __init__(self, listening: socket.socket, *, word: str, purpose: str, say: Callable[[str], None]) -> None:
        super().__init__(listening, name=purpose)
        self._word, self._say = word, say
        self.strangers: list[str] = []
        self._at_the_door: dict[Writer, None] = {}
        self._refused = 0

    async def _greet(self, reader: Reader, writer: Writer) -> None:
        try:
            seal = await self._seal(reader, writer)
            if seal is not None:
                await self._welcome(reader, writer, seal)
        except Refused as refused:
            self._tell(writer, str(refused))
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    async def _seal(self, reader: Reader, writer: Writer) -> Seal | None:
        """Of who is let in. Raises Refused."""
        while len(self._at_the_door) >= _MOST_AT_THE_DOOR:
            longest = next(iter(self._at_the_door))
            del self._at_the_door[longest]
            longest.transport.abort()
        self._at_the_door[writer] = None
        try:
            asked = admitted(reader, writer, word=self._word, purpose=self.name.encode())
            found = await asyncio.wait_for(asked, PATIENCE_SECONDS)
        except TimeoutError:
            raise Refused(f"it did not end its handshake within {PATIENCE_SECONDS:g} s") from None
        finally:
            self._at_the_door.pop(writer, None)
        if isinstance(found, str):
            if len(self.strangers) < _MOST_STRANGERS:
                self.strangers.append(found)
            return None
        return found

    def _tell(self, writer: Writer, why: str) -> None:
        self._refused += 1
        if self._refused <= _MOST_TOLD:
            more = "; no more are told" if self._refused == _MOST_TOLD else ""
            self._say(f"the {self.name} refused a connection of {caller(writer)}: {why}{more}")

    @abstractmethod
    async def _welcome(self, reader: Reader, writer: Writer, seal: Seal) -> None:
        """A connection that was let in has been served to its end. Raises Refused for one that is not served on."""


def caller(writer: Writer) -> str:
    """ADDRESS:PORT of the other side, alike whether the connection is one of version 4 or 6 of the protocol."""
    found = writer.get_extra_info("peername") or ("?", 0)
    return place(found[0], found[1])


def place(address: str, port: int) -> str:
    """ADDRESS:PORT."""
    return f"{address.removeprefix('::ffff:')}:{port}"
