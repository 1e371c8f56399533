"""A port in the place of another one, behind which nobody knows the word of a run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def false_port() -> Iterator[tuple[str, int]]:
    """Its address; who calls is answered once, as by one who makes the answer up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            caller, _ = listening.accept()
            with caller:
                caller.sendall(bytes(64))
                caller.recv(200)

        liar = threading.Thread(target=pretend)
        liar.start()
        yield listening.getsockname()
        liar.join()
