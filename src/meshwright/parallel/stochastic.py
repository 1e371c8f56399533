"""Stochastic rounding to bf16, by numbers that depend on what is rounded and not on where it lies.

A number between two neighbours of bf16 becomes either, the nearer one more often, so that on average it stays what it
is (1502.02551): updates smaller than half a step of bf16 are not lost. The sixteen random bits of an element are a hash
of the run's seed, its parameter's name, the step and the element's place in the whole parameter, so that every layout
rounds alike. Places of more than 2^32 elements are told apart by their lower bits.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from meshwright.parallel.shards import cuts

_KEPT = -0x10000  # the bits of an fp32 number that bf16 has


def key_of(name: str, *, seed: int) -> int:
    """32 bits of the parameter `name` of a run."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "big")


def places(x: Tensor, *, start: int, stop: int) -> Tensor:
    """Places in the whole of x, as it lies in memory, of elements [start, stop) of this rank's part; int64."""
    local = x.to_local() if hasattr(x, "to_local") else x
    first = [0] * x.dim()
    for cut in cuts(x):
        first[cut.dim] += cut.start(cut.group.rank())
    # Dims that no cut parts from those inside them are one run of neighbours in the whole, as they are here.
    runs: list[tuple[int, int]] = []
    moved = 0
    for dim in reversed(range(x.dim())):
        length, stride = max(local.shape[dim], 1), math.prod(x.shape[dim + 1 :])
        moved += first[dim] * stride
        joins = bool(runs) and runs[-1][0] * runs[-1][1] == stride
        inside, step = runs.pop() if joins else (1, stride)
        runs.append((inside * length, step))
    rest = torch.arange(start, stop, dtype=torch.int64, device=local.device)
    found = torch.full_like(rest, moved)
    for length, step in runs[:-1]:
        found += (rest % length) * step
        rest = rest // length
    return found.add_(rest, alpha=runs[-1][1] if runs else 1)


def random_bits(where: Tensor, *, step: Tensor, key: int) -> Tensor:
    """Sixteen bits of each place in int32; `step` is a scalar on its device."""
    of_step = _mixed((step.to(torch.int64) ^ key).to(torch.int32))
    return _mixed(where.to(torch.int32) ^ of_step).bitwise_and_(0xFFFF)


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 x as bf16, away from zero where its lower bits and the random ones carry; what is no number stays so."""
    raw = x.view(torch.int32)
    return torch.where(x.isfinite(), ((raw + bits) & _KEPT).view(torch.float32), x).to(torch.bfloat16)


def _mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits, each of which depends on all of x (C. Wellons, hash-prospector, lowbias32); in int32, whose
    products wrap, and whose shifts fill with the sign, which is masked."""
    x = x ^ (x >> 16).bitwise_and_(0xFFFF)
    x.mul_(0x7FEB352D).bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(0x846CA68B - 2**32).bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x
