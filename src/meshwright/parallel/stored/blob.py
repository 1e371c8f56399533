"""Bytes of tensors in files: views of memory, whole reads, and a sum of every block.

The sum is CRC-32, which zlib makes three times as fast as any digest at hand. It is against rot, torn writes and mixed
up files, and not against forgers: who can write a file can write its sum too, and nothing that is read is run.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

THREADS = 4
BLOCK_BYTES = 2**22
BUFFER_BYTES = 2**20

Bytes = npt.NDArray[np.uint8]


class SpoiltBlock(Exception):
    """Block `number` of a part does not have its sum."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def bytes_of(x: Tensor) -> Bytes:
    """The bytes of `x`, row by row; those it has itself where it lies so in the host's memory."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def lies_whole(x: Tensor) -> bool:
    """`bytes_of` is the memory of `x` itself."""
    return x.device.type == "cpu" and x.is_contiguous()


def num_blocks(size: int) -> int:
    """Of a part of `size` bytes, the last one may be shorter."""
    return -(-size // BLOCK_BYTES)


def block(number: int, size: int) -> tuple[int, int]:
    """[start, stop) of block `number` of `size` bytes."""
    return number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size)


def sum_of_block(data: Bytes, number: int) -> int:
    start, stop = block(number, data.nbytes)
    return zlib.crc32(data.data[start:stop])


def check_ends(file: int, stop: int) -> None:
    """Raises OSError where `file`, a descriptor, ends before byte `stop`."""
    size = os.fstat(file).st_size
    if stop > size:
        raise OSError(errno.EIO, f"the file ends at byte {size} of {stop}")


def read_into(data: Bytes, file: int, *, at: int) -> None:
    """`data` holds what `file`, a descriptor, has from byte `at`. Raises OSError where it ends before."""
    done = 0
    while done < data.nbytes:
        count = os.preadv(file, [data.data[done:]], at + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends at byte {at + done} of {at + data.nbytes}")
        done += count


def read_part(into: Bytes, file: int, *, at: int, size: int, sums: Sequence[int], start: int = 0) -> None:
    """`into` holds what the part of `size` bytes at byte `at` of `file` has from its byte `start` on.

    Every block of which something is taken is read once and whole, and has its sum. Raises SpoiltBlock where one has
    not, and OSError where the file ends before.
    """
    stop = start + into.nbytes
    for number in range(start // BLOCK_BYTES, num_blocks(stop) if into.nbytes else 0):
        first, last = block(number, size)
        inside = start <= first and last <= stop
        whole: Bytes = into[first - start : last - start] if inside else np.empty(last - first, dtype=np.uint8)
        read_into(whole, file, at=at + first)
        if zlib.crc32(whole.data) != sums[number]:
            raise SpoiltBlock(number)
        if not inside:
            begin, end = max(start, first), min(stop, last)
            into[begin - start : end - start] = whole[begin - first : end - first]


def check_part(file: int, *, at: int, size: int, sums: Sequence[int]) -> None:
    """Every block of the part has its sum; little of it is in memory at a time. Raises as `read_part`."""
    check_ends(file, at + size)
    buffer: Bytes = np.empty(min(size, BUFFER_BYTES), dtype=np.uint8)
    for number in range(num_blocks(size)):
        first, last = block(number, size)
        total = 0
        for start in range(first, last, BUFFER_BYTES):
            piece = buffer[: min(BUFFER_BYTES, last - start)]
            read_into(piece, file, at=at + start)
            total = zlib.crc32(piece.data, total)
        if total != sums[number]:
            raise SpoiltBlock(number)
