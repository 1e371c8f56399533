"""Handshake: both sides of a connection prove that they know a word, before either reads anything else.

Whoever listens sends a number that it drew; who calls draws one too and answers with the HMAC (RFC 2104) of both under
the word, and so does who listens. The word is never sent, and what was heard of one connection is of no use in another,
since the numbers are new. From both numbers comes a key of this connection alone, by which messages can be sealed: they
are numbered and signed, so that nobody on the way can change, drop, repeat or add one. They are not hidden.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from asyncio import IncompleteReadError
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer

WORD_VARIABLE = "MESHWRIGHT_BOARD_WORD"
PATIENCE_SECONDS = 10.0  # for a handshake
_NONCE = 32
_SIGNATURE = 32
_SIZE = 4
_LONGEST_NOTE = 4096
_LONGEST_MESSAGE = 1 << 24
_KNOWS, _STRANGER = b"K", b"S"


class Refused(Exception):
    """The other side is not let in, for the reason told."""


class Seal:
    """Of one side of a connection: what it sends is signed, and what comes is of the other side and of this place in
    the order."""

    def __init__(self, key: bytes, *, sends: bytes, hears: bytes) -> None:
        self._key, self._sends, self._hears = key, sends, hears
        self._sent = self._heard = 0

    def closed(self, body: bytes) -> bytes:
        """`body` as it is sent."""
        self._sent += 1
        return len(body).to_bytes(_SIZE, "big") + self._signature(self._sends, self._sent, body) + body

    def length(self, head: bytes) -> int:
        """Of the body that follows `head`, the first `HEAD` bytes of what is sent. Raises Refused for too much."""
        length = int.from_bytes(head[:_SIZE], "big")
        if length > _LONGEST_MESSAGE:
            raise Refused(f"it announces a message of {length:,} bytes")
        return length

    def opened(self, head: bytes, body: bytes) -> bytes:
        """`body`. Raises Refused where it is not what the other side sent at this place."""
        self._heard += 1
        if not hmac.compare_digest(head[_SIZE:], self._signature(self._hears, self._heard, body)):
            raise Refused("its message was changed on the way")
        return body

    def _signature(self, side: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "big") + body, hashlib.sha256)


HEAD = _SIZE + _SIGNATURE


async def admitted(reader: Reader, writer: Writer, *, word: str, purpose: bytes) -> Seal | str | None:
    """The seal of a caller that knows `word`; what one says that owns not to know it; None of one that only looked
    whether anybody listens. Raises Refused, having read no more than a handshake has."""
    mine = secrets.token_bytes(_NONCE)
    writer.write(mine)
    kind = await reader.read(1)
    if not kind:
        return None
    if kind not in (_KNOWS, _STRANGER):
        raise Refused("it does not begin as a handshake does")
    try:
        theirs = await reader.readexactly(_NONCE)
        if kind == _STRANGER:
            said = await reader.readexactly(min(int.from_bytes(theirs[:_SIZE], "big"), _LONGEST_NOTE))
            return said.decode(errors="replace")
        proof = await reader.readexactly(_NONCE)
    except IncompleteReadError:
        raise Refused("it hung up in the middle of a handshake") from None
    if not hmac.compare_digest(proof, _proof(word, purpose + b" calls", mine, theirs)):
        raise Refused("it does not know the word")
    writer.write(_proof(word, purpose + b" listens", theirs, mine))
    return Seal(_key(word, purpose, mine, theirs), sends=b"listens", hears=b"calls")


async def introduced(reader: Reader, writer: Writer, *, word: str, purpose: bytes) -> Seal | None:
    """The seal of this side, which calls; None where the other one does not know `word`. Raises EOFError where it hangs
    up, as it does on who does not."""
    theirs, mine = await reader.readexactly(_NONCE), secrets.token_bytes(_NONCE)
    writer.write(_KNOWS + mine + _proof(word, purpose + b" calls", theirs, mine))
    return _checked(await reader.readexactly(_NONCE), word, purpose, theirs=theirs, mine=mine)


def introduce(line: socket.socket, *, word: str, purpose: bytes) -> Seal | None:
    """As `introduced`, over a socket. Raises ConnectionError where the other side hangs up."""
    theirs, mine = exactly(line, _NONCE), secrets.token_bytes(_NONCE)
    line.sendall(_KNOWS + mine + _proof(word, purpose + b" calls", theirs, mine))
    return _checked(exactly(line, _NONCE), word, purpose, theirs=theirs, mine=mine)


def leave_a_note(line: socket.socket, text: str) -> None:
    """Who does not know the word says so, and `text`."""
    told = text.encode()[:_LONGEST_NOTE]
    exactly(line, _NONCE)
    line.sendall(_STRANGER + len(told).to_bytes(_SIZE, "big").ljust(_NONCE, b"\0") + told)


def exactly(line: socket.socket, count: int) -> bytes:
    """So many bytes. Raises ConnectionError where the other side hangs up before."""
    found = bytearray()
    while len(found) < count:
        more = line.recv(count - len(found))
        if not more:
            raise ConnectionError("connection closed by peer")
        found += more
    return bytes(found)


def _checked(proof: bytes, word: str, purpose: bytes, *, theirs: bytes, mine: bytes) -> Seal | None:
    if not hmac.compare_digest(proof, _proof(word, purpose + b" listens", mine, theirs)):
        return None
    return Seal(_key(word, purpose, theirs, mine), sends=b"calls", hears=b"listens")


def _proof(word: str, side: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.digest(word.encode(), side + challenge + own, hashlib.sha256)


def _key(word: str, purpose: bytes, listens: bytes, calls: bytes) -> bytes:
    return _proof(word, purpose + b" key", listens, calls)
