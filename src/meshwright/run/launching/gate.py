"""Gate: the one open port of a launch. It lets in who knows the word that node 0 left in the run directory.

Behind it is node 0's store, which asks nobody who they are and is reached from its own machine alone. Other nodes reach
it through a door of theirs, a port of their loopback whose connections go on to the gate and prove there that they know
the word. What follows is neither sealed nor signed.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import Callable
from contextlib import suppress

from meshwright.run import handshake
from meshwright.run.handshake import PATIENCE_SECONDS, Seal, introduce, introduced
from meshwright.run.ports import BACKLOG, Guarded, Port

_PURPOSE = "gate"
_BUFFER = 1 << 16


class Gate(Guarded):
    """Node 0's, before the store at `store_port` of its loopback."""

    def __init__(self, listening: socket.socket, *, word: str, store_port: int, say: Callable[[str], None]) -> None:
        super().__init__(listening, word=word, purpose=_PURPOSE, say=say)
        self._store_port = store_port

    async def _welcome(self, reader: Reader, writer: Writer, _seal: Seal) -> None:
        store = await asyncio.open_connection("127.0.0.1", self._store_port)
        await asyncio.gather(_pour(reader, store[1]), _pour(store[0], writer))


class Door(Port):
    """Another node's: connections of its own machine to `port` go on to the gate at `head`."""

    def __init__(self, *, head: tuple[str, int], word: str) -> None:
        super().__init__(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG), name="door")
        self._head, self._word = head, word

    async def _greet(self, reader: Reader, writer: Writer) -> None:
        try:
            out = await asyncio.wait_for(self._out(), PATIENCE_SECONDS)
            if out is not None:
                await asyncio.gather(_pour(reader, out[1]), _pour(out[0], writer))
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _out(self) -> tuple[Reader, Writer] | None:
        out = await asyncio.open_connection(*self._head)
        if await introduced(*out, word=self._word, purpose=_PURPOSE.encode()) is None:
            out[1].close()
            return None
        return out


def knows(word: str, *, head: tuple[str, int]) -> bool:
    """Whether the gate at `head` lets in who says `word`, and knows it too. Raises OSError where nothing answers."""
    with socket.create_connection(head, timeout=PATIENCE_SECONDS) as line:
        try:
            return introduce(line, word=word, purpose=_PURPOSE.encode()) is not None
        except ConnectionError:
            return False


def leave_a_note(text: str, *, head: tuple[str, int]) -> None:
    """Who does not know the word says so, and who it is, if the gate still listens."""
    with suppress(OSError), socket.create_connection(head, timeout=PATIENCE_SECONDS) as line:
        handshake.leave_a_note(line, text)


async def _pour(reader: Reader, writer: Writer) -> None:
    """All that comes on one side is on the other, which ends when it does."""
    try:
        while more := await reader.read(_BUFFER):
            writer.write(more)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
