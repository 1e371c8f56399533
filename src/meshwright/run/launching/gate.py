"""Gate: the one open port of a launch. It lets in who knows the word that node 0 left in the run directory.

Behind it is node 0's store, which asks nobody who they are and is reached from its own machine alone. Other nodes reach
it through a door of theirs, a port of their loopback whose connections go on to the gate and prove there that they know
the word: the HMAC (RFC 2104) of a number that the other side drew, both ways. The word itself is never sent. What
follows is neither sealed nor signed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from contextlib import suppress

_NONCE = 32
_KNOWS, _STRANGER = b"K", b"S"
_PATIENCE = 10.0  # seconds for a handshake
_MOST_STRANGERS = 64
_LONGEST = 4096
_BACKLOG = 1024
_BUFFER = 1 << 16


class _Relay(threading.Thread, ABC):
    """Everything that comes to `listening` goes on to where `_lead` leads it, from a thread of its own."""

    def __init__(self, listening: socket.socket, *, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._listening = listening
        self.port: int = listening.getsockname()[1]

    def run(self) -> None:
        with suppress(OSError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._greet, sock=self._listening, backlog=_BACKLOG)
        async with server:
            await server.serve_forever()

    async def _greet(self, reader: Reader, writer: Writer) -> None:
        try:
            led = await asyncio.wait_for(self._lead(reader, writer), _PATIENCE)
            if led is not None:
                await asyncio.gather(_pour(reader, led[1]), _pour(led[0], writer))
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.close()

    @abstractmethod
    async def _lead(self, reader: Reader, writer: Writer) -> tuple[Reader, Writer] | None:
        """The other end of a connection; None where it is not let in."""


class Gate(_Relay):
    """Node 0's, before the store at `store_port` of its loopback. `strangers` are what those said who did not know the
    word: nothing of it is known to be true."""

    def __init__(self, listening: socket.socket, *, word: str, store_port: int) -> None:
        super().__init__(listening, name="gate")
        self._word, self._store_port = word, store_port
        self.strangers: list[str] = []

    async def _lead(self, reader: Reader, writer: Writer) -> tuple[Reader, Writer] | None:
        mine = secrets.token_bytes(_NONCE)
        writer.write(mine)
        kind, theirs = await reader.readexactly(1), await reader.readexactly(_NONCE)
        if kind == _STRANGER:
            said = await reader.readexactly(min(int.from_bytes(theirs[:4], "big"), _LONGEST))
            if len(self.strangers) < _MOST_STRANGERS:
                self.strangers.append(said.decode(errors="replace"))
            return None
        proof = await reader.readexactly(_NONCE)
        if kind != _KNOWS or not hmac.compare_digest(proof, _proof(self._word, b"node", mine, theirs)):
            return None
        writer.write(_proof(self._word, b"head", theirs, mine))
        return await asyncio.open_connection("127.0.0.1", self._store_port)


class Door(_Relay):
    """Another node's: connections of its own machine to `port` go on to the gate at `head`."""

    def __init__(self, *, head: tuple[str, int], word: str) -> None:
        super().__init__(socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG), name="door")
        self._head, self._word = head, word

    async def _lead(self, reader: Reader, writer: Writer) -> tuple[Reader, Writer] | None:
        out = await asyncio.open_connection(*self._head)
        theirs, mine = await out[0].readexactly(_NONCE), secrets.token_bytes(_NONCE)
        out[1].write(_KNOWS + mine + _proof(self._word, b"node", theirs, mine))
        proof = await out[0].readexactly(_NONCE)
        if not hmac.compare_digest(proof, _proof(self._word, b"head", mine, theirs)):
            out[1].close()
            return None
        return out


def knows(word: str, *, head: tuple[str, int]) -> bool:
    """Whether the gate at `head` lets in who says `word`, and knows it too. Raises OSError where nothing answers."""
    with socket.create_connection(head, timeout=_PATIENCE) as line:
        theirs, mine = _exactly(line, _NONCE), secrets.token_bytes(_NONCE)
        line.sendall(_KNOWS + mine + _proof(word, b"node", theirs, mine))
        try:
            proof = _exactly(line, _NONCE)
        except ConnectionError:
            return False
    return hmac.compare_digest(proof, _proof(word, b"head", mine, theirs))


def leave_a_note(text: str, *, head: tuple[str, int]) -> None:
    """Who does not know the word says so, and who it is, if the gate still listens."""
    told = text.encode()[:_LONGEST]
    with suppress(OSError), socket.create_connection(head, timeout=_PATIENCE) as line:
        _exactly(line, _NONCE)
        line.sendall(_STRANGER + len(told).to_bytes(4, "big").ljust(_NONCE, b"\0") + told)


def _proof(word: str, side: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.new(word.encode(), side + challenge + own, hashlib.sha256).digest()


def _exactly(line: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = line.recv(count - len(found))
        if not more:
            raise ConnectionError("the other side hung up")
        found += more
    return found


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
