"""Homes: where each host of an elastic run keeps a board, and the file by which one of them alone leads.

Whoever is to lead makes the file of the next term in the run directory. It can be made once: hosts that lose contact
while all of them live do not go on apart. Connections tell of a host's end even where it says nothing any more: the
system asks the other side every second, and gives up after three.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from meshwright.spec import codec

_SILENT_SECONDS = 3
_ANSWER_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The board of host `host`."""

    host: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}@{self.address}:{self.port}"

    @classmethod
    def of(cls, text: str) -> Home:
        """What `str` has written."""
        host, _, place = text.partition("@")
        address, _, port = place.rpartition(":")
        return cls(host=int(host), address=address, port=int(port))

    @property
    def answers(self) -> bool:
        """Whether a process listens there."""
        return self._asked() is None

    @property
    def is_gone(self) -> bool:
        """Whether its machine says that nobody listens there any more, which one that is cut off would not."""
        return isinstance(self._asked(), ConnectionRefusedError)

    def _asked(self) -> OSError | None:
        try:
            with socket.create_connection((self.address, self.port), timeout=_ANSWER_SECONDS):
                return None
        except OSError as error:
            return error


def connected(home: Home, *, timeout: timedelta) -> dist.TCPStore:
    """The store at `home`. Raises DistError at once where nobody listens there."""
    if not home.answers:
        raise dist.DistNetworkError(f"connection refused by the board of host {home.host}")
    store = dist.TCPStore(
        home.address, home.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    store.set_timeout(timeout)
    notice_loss(one for one in own_connections() if one.raddr.port == home.port)
    return store


class Address(NamedTuple):
    """One side of a connection, as psutil has it."""

    ip: str
    port: int


class End(NamedTuple):
    """This process's end of a connection: its descriptor, its own address and that of the other side."""

    fd: int
    laddr: Address
    raddr: Address


def notice_loss(ends: Iterable[End]) -> None:
    """Connections of this process break when the other side is not there any more."""
    for end in ends:
        with suppress(OSError), socket.socket(fileno=os.dup(end.fd)) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_SECONDS)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_SECONDS)


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


def text_of(end: Any) -> str:
    """ADDRESS:PORT, alike whether the connection is one of version 4 or 6 of the protocol."""
    return f"{end.ip.removeprefix('::ffff:')}:{end.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """In the `number`-th term of a run directory the host of `home` leads a run of a design with `digest`."""

    number: int
    home: Home
    digest: str


def terms_path(run_dir: Path) -> Path:
    return run_dir / "elastic" / "terms"


def newest_term(run_dir: Path) -> Term | None:
    """None where no host ever led."""
    names = sorted(path for path in terms_path(run_dir).glob("*.json") if path.stem.isdigit())
    for path in reversed(names):
        with suppress(OSError, ValueError):
            return codec.decode(Term, json.loads(path.read_text()), str(path))
    return None


def claim(run_dir: Path, term: Term) -> bool:
    """Whether this host leads in `term`; not where another one does."""
    path = terms_path(run_dir) / f"{term.number:06}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), path.open("x") as file:
        file.write(json.dumps(codec.encode(term)))
        return True
    return False
