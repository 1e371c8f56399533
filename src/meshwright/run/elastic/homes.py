"""Homes: where each host of an elastic run keeps a board, and the file by which one of them alone leads.

Whoever is to lead makes the file of the next term in the run directory. It can be made once: hosts that lose contact
while all of them live do not go on apart.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec import codec

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
