"""Bytes of tensors in files: views of memory, whole reads, checksums."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

THREADS = 4
PIECE_BYTES = 2**22

Bytes = npt.NDArray[np.uint8]


def bytes_of(x: Tensor) -> Bytes:
    """The bytes of `x`, row by row; those it has itself where it lies so in the host's memory."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def lies_whole(x: Tensor) -> bool:
    """`bytes_of` is the memory of `x` itself."""
    return x.device.type == "cpu" and x.is_contiguous()


def checksum(data: Bytes) -> str:
    return hashlib.sha256(data.data).hexdigest()


def read_into(data: Bytes, file: int, *, at: int) -> None:
    """`data` holds what `file`, a descriptor, has from byte `at`. Raises OSError where it ends before."""
    size = os.fstat(file).st_size
    if at + data.nbytes > size:
        raise OSError(errno.EIO, f"the file ends at byte {size} of {at + data.nbytes}")
    done = 0
    while done < data.nbytes:
        done += os.preadv(file, [data.data[done : done + PIECE_BYTES]], at + done)


def checksum_of_file(file: int, *, at: int, size: int) -> str:
    """That of `size` bytes of `file`, a descriptor, from byte `at`, of which a piece is in memory at a time."""
    total = hashlib.sha256()
    piece: Bytes = np.empty(min(size, PIECE_BYTES), dtype=np.uint8)
    for start, stop in pieces(size):
        read_into(piece[: stop - start], file, at=at + start)
        total.update(piece[: stop - start].data)
    return total.hexdigest()


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of every piece of `size` bytes."""
    for start in range(0, size, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, size)
