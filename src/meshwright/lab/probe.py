"""How long a byte takes between two hosts, and how many cross in a second.

    python -m meshwright.lab.probe serve ADDRESS PORT
    python -m meshwright.lab.probe ask ADDRESS PORT SECONDS

The first answers one caller and ends; the second calls it and prints one line of JSON: `latency_seconds`, half of the
quickest round trip of one byte, and bytes/s each way: the best of a few tries, that last about SECONDS together. What
else a machine does makes a link seem slower, never faster.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import suppress

_CHUNK = b"\0" * 65536
_ROUND_TRIPS = 20
_TRIES = 3
_PATIENCE_SECONDS = 20.0
_ECHO, _DRAIN, _FILL, _END = b"edfx"


def serve(address: str, port: int) -> None:
    """One caller has been answered."""
    with socket.create_server((address, port)) as server:
        server.settimeout(_PATIENCE_SECONDS)
        caller, _ = server.accept()
        with caller:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller.settimeout(_PATIENCE_SECONDS)
            while True:
                asked = caller.recv(1)
                if not asked or asked[0] == _END:
                    return
                if asked[0] == _ECHO:
                    caller.sendall(asked)
                elif asked[0] == _DRAIN:
                    caller.sendall(_told(_drained(caller)))
                else:
                    _flood(caller, seconds=float(_line(caller)))


def ask(address: str, port: int, *, seconds: float) -> dict[str, float]:
    """What crosses between this host and the one that serves at `address`."""
    with _called(address, port) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(_PATIENCE_SECONDS + seconds)
        trips = []
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            peer.sendall(bytes([_ECHO]))
            _received(peer, 1)
            trips.append(time.perf_counter() - began)
        there, back = 0.0, 0.0
        for _ in range(_TRIES):
            there = max(there, _sent(peer, seconds=seconds / _TRIES))
            back = max(back, _fetched(peer, seconds=seconds / _TRIES))
        peer.sendall(bytes([_END]))
    return {"latency_seconds": 0.5 * min(trips), "sent_per_second": there, "received_per_second": back}


def _sent(peer: socket.socket, *, seconds: float) -> float:
    peer.sendall(bytes([_DRAIN]))
    _flood(peer, seconds=seconds)
    return float(json.loads(_line(peer))["bytes_per_second"])


def _fetched(peer: socket.socket, *, seconds: float) -> float:
    peer.sendall(bytes([_FILL]) + f"{seconds}\n".encode())
    return _drained(peer)


def _called(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=_PATIENCE_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _flood(peer: socket.socket, *, seconds: float) -> None:
    """Bytes for so long, and one that is not zero for the end."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        peer.sendall(_CHUNK)
    peer.sendall(b"\1")


def _drained(peer: socket.socket) -> float:
    """bytes/s of the second half of what came until the end: queues on the way are full by then."""
    came = [(time.perf_counter(), 0)]
    total = 0
    while True:
        chunk = _received(peer, 1 << 20)
        total += len(chunk)
        came.append((time.perf_counter(), total))
        if chunk[-1]:
            break
    middle = 0.5 * (came[0][0] + came[-1][0])
    began, before = next(entry for entry in came if entry[0] >= middle)
    ended, after = came[-1]
    if ended == began:
        (began, before), (ended, after) = came[0], came[-1]
    return (after - before) / max(ended - began, 1e-9)


def _told(rate: float) -> bytes:
    return json.dumps({"bytes_per_second": rate}).encode() + b"\n"


def _line(peer: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        found += _received(peer, 1)
    return found


def _received(peer: socket.socket, most: int) -> bytes:
    found = peer.recv(most)
    if not found:
        raise ConnectionResetError("the other host left before the end")
    return found


def main(words: list[str]) -> int:
    """The exit code: 1, with one line of why, where the other host was not reached."""
    with suppress(BrokenPipeError):
        try:
            if words[0] == "serve":
                serve(words[1], int(words[2]))
            else:
                print(json.dumps(ask(words[1], int(words[2]), seconds=float(words[3]))))
        except OSError as error:
            print(f"{words[1]}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
