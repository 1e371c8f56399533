"""A cable that delays and loses packets, for kernels whose queues cannot: two taps with this process between them.

    python -m meshwright.lab.relay FIRST SECOND SECONDS LOSS

makes the taps FIRST and SECOND in its namespace, says `ready`, and passes every packet from one to the other SECONDS
later, or with probability LOSS never. Packets that the kernel has not yet cut to size pass whole, as through a card
that cuts them itself, unless some are to be lost, which must be the small ones.
"""

from __future__ import annotations

import fcntl
import os
import random
import selectors
import signal
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_TAP, _NO_PACKET_INFO, _HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _SEGMENTS_4, _SEGMENTS_6 = 0x01, 0x02, 0x04
_HEADER_BYTES = 10
_MOST_BYTES = 70_000
_AT_ONCE = 64
_SHORT_SECONDS = 1e-3  # selectors wait in milliseconds


def tap(name: str, *, whole: bool) -> int:
    """A new tap; with `whole`, packets come with a header and uncut."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PACKET_INFO | (_HEADER if whole else 0)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), flags))
    if whole:
        fcntl.ioctl(file, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER_BYTES))
        fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUM | _SEGMENTS_4 | _SEGMENTS_6)
    return file


def relay(first: int, second: int, *, seconds: float, loss: float) -> None:
    """Passes packets both ways until standard input ends, as it does with whoever started this."""
    chance = random.Random(0)
    waiting: deque[tuple[float, int, bytes]] = deque()
    other = {first: second, second: first}
    readers = selectors.DefaultSelector()
    for file in other:
        readers.register(file, selectors.EVENT_READ)
    readers.register(sys.stdin, selectors.EVENT_READ)
    while True:
        now = time.perf_counter()
        while waiting and waiting[0][0] <= now:
            _, file, packet = waiting.popleft()
            _write(file, packet)
        left = waiting[0][0] - now if waiting else 1.0
        for key, _ in readers.select(0.0 if left < _SHORT_SECONDS else left - 0.5 * _SHORT_SECONDS):
            if key.fileobj is sys.stdin:
                return
            file = int(key.fd)
            for packet in _packets(file):
                if loss == 0.0 or chance.random() >= loss:
                    waiting.append((time.perf_counter() + seconds, other[file], packet))


def _packets(file: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < _AT_ONCE:
        try:
            found.append(os.read(file, _MOST_BYTES))
        except BlockingIOError:
            break
    return found


def _write(file: int, packet: bytes) -> None:
    try:
        os.write(file, packet)
    except OSError:
        return  # a full queue loses it, as a switch does


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for what runs in the lab, which may save across the link
    ends = [tap(name, whole=float(sys.argv[4]) == 0.0) for name in sys.argv[1:3]]
    print("ready", flush=True)
    relay(ends[0], ends[1], seconds=float(sys.argv[3]), loss=float(sys.argv[4]))
