"""Bytes of tensors in files: views of memory, and a sum of every block.

The sum is CRC-32, which zlib makes three times as fast as any digest at hand. It is against rot, torn writes and mixed
up files, and not against forgers: who can write a file can write its sum too, and nothing that is read is run.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK_BYTES = 2**22

Bytes = npt.NDArray[np.uint8]


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


def block_at(byte: int) -> int:
    """The number of the block that `byte` of a part lies in."""
    return byte // BLOCK_BYTES


def sum_of_block(data: Bytes, number: int) -> int:
    start, stop = block(number, data.nbytes)
    return zlib.crc32(data.data[start:stop])
