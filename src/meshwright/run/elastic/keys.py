"""Keys: a board's values by name, kept by one process and used by those that know the run's word.

It is a store of torch's kind, by which process groups are formed; torch's own asks nobody who they are. Messages are
sealed, since a board says who trains and what is started.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import weakref
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from meshwright.run.handshake import HEAD, PATIENCE_SECONDS, Refused, Seal, exactly, introduce
from meshwright.run.ports import BACKLOG, Guarded, caller, place

_PURPOSE = "board"
_SIZE = 4
_SLICE_SECONDS = 0.1  # of a wait: that who waited is gone, or has waited enough, is noticed after it
_SILENT_SECONDS = 3
_SET, _FIND, _HAS, _WAIT = b"set", b"find", b"has", b"wait"
_YES, _NO = b"yes", b"no"


class KeyServer(Guarded):
    """Keeps the values, at `address` alone, and knows the `guests`: ADDRESS:PORT of who is connected."""

    def __init__(self, address: str, *, word: str, say: Callable[[str], None]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        super().__init__(listening, word=word, purpose=_PURPOSE, say=say)
        self.guests: set[str] = set()
        self._kept: dict[bytes, bytes] = {}
        self._coming: dict[bytes, asyncio.Future[None]] = {}

    async def _welcome(self, reader: Reader, writer: Writer, seal: Seal) -> None:
        notice_loss(writer.get_extra_info("socket"))
        guest = caller(writer)
        self.guests.add(guest)
        try:
            while True:
                head = await reader.readexactly(HEAD)
                body = await reader.readexactly(seal.length(head))
                writer.write(seal.closed(_packed(await self._answer(_unpacked(seal.opened(head, body))))))
                await writer.drain()
        finally:
            self.guests.discard(guest)

    async def _answer(self, asked: Sequence[bytes]) -> Sequence[bytes]:
        match asked:
            case [kind, key, value] if kind == _SET:
                self._kept[key] = value
                coming = self._coming.pop(key, None)
                if coming is not None:
                    coming.set_result(None)
                return [_YES]
            case [kind, *keys] if kind == _FIND:
                return [_YES + self._kept[key] if key in self._kept else _NO for key in keys]
            case [kind, *keys] if kind == _HAS:
                return [_YES if all(key in self._kept for key in keys) else _NO]
            case [kind, *keys] if kind == _WAIT:
                try:
                    await asyncio.wait_for(self._all_there(keys), _SLICE_SECONDS)
                except TimeoutError:
                    return [_NO]
                return [_YES]
        raise Refused("it asks for what a board does not have")

    async def _all_there(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key not in self._kept:
                coming = self._coming.setdefault(key, asyncio.get_running_loop().create_future())
                await asyncio.shield(coming)


class KeyStore(dist.Store):
    """The values at `address` and `port`, over one connection, whose own end is `end`. Waits last `timeout` at most.

    Raises DistNetworkError where nobody listens there who knows `word`, and whenever the connection is lost.
    """

    def __init__(self, address: str, port: int, *, word: str, timeout: timedelta) -> None:
        super().__init__()
        self._lock, self._timeout = threading.Lock(), timeout
        try:
            self._line = socket.create_connection((address, port), timeout=PATIENCE_SECONDS)
            weakref.finalize(self, self._line.close)
            self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            seal = introduce(self._line, word=word, purpose=_PURPOSE.encode())
            if seal is None:
                raise ConnectionError("who listens there does not know the word of this run")
            self._seal = seal
            self.end = place(*self._line.getsockname()[:2])
        except OSError as error:
            raise dist.DistNetworkError(f"the board at {address}:{port}: {error}") from None

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_SET, key.encode(), value.encode() if isinstance(value, str) else value)

    def find(self, *keys: str) -> tuple[bytes | None, ...]:
        """Of each of them its value, None before anybody has set it."""
        found = self._ask(_FIND, *(key.encode() for key in keys))
        return tuple(each.removeprefix(_YES) if each.startswith(_YES) else None for each in found)

    def get(self, key: str) -> bytes:
        self.wait([key])
        (found,) = self.find(key)
        assert found is not None, "values stay"
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(_HAS, *(key.encode() for key in keys))[0] == _YES

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self._timeout).total_seconds()
        end = time.monotonic() + seconds
        while self._ask(_WAIT, *(key.encode() for key in keys))[0] != _YES:
            if time.monotonic() >= end:
                raise dist.DistStoreError(f"wait timeout after {1000 * seconds:.0f} ms, keys: {', '.join(keys)}")

    def notice_loss(self) -> None:
        """The connection breaks when the other side's machine is not there any more."""
        notice_loss(self._line)

    def hang_up(self) -> None:
        """Whatever waits here fails now."""
        try:
            self._line.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _ask(self, *asked: bytes) -> list[bytes]:
        with self._lock:
            try:
                self._line.settimeout(self._timeout.total_seconds() + _SLICE_SECONDS)
                self._line.sendall(self._seal.closed(_packed(asked)))
                head = exactly(self._line, HEAD)
                return _unpacked(self._seal.opened(head, exactly(self._line, self._seal.length(head))))
            except TimeoutError:
                self._line.close()
                raise dist.DistNetworkError("socket timeout: the board does not answer") from None
            except (OSError, Refused) as error:
                self._line.close()
                raise dist.DistNetworkError(f"connection closed by peer, a board: {error}") from None


def notice_loss(line: socket.socket) -> None:
    """The connection breaks when the other side is not there any more: the system asks every second, and gives up after
    three."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_SECONDS)


def _packed(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(_SIZE, "big") + part for part in parts)


def _unpacked(text: bytes) -> list[bytes]:
    """Raises Refused for what `_packed` has not made."""
    return list(_parts(text))


def _parts(text: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(text):
        begin = at + _SIZE
        at = begin + int.from_bytes(text[at:begin], "big")
        if at > len(text):
            raise Refused("its message is cut off")
        yield text[begin:at]
