"""Muon's products, which make matrices orthogonal (Jordan et al., 2024), and the exchanges that bring them together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.cost.optimizers import Optimized, UpdateRates
from meshwright.cost.products import product_seconds
from meshwright.cost.states import state_bytes
from meshwright.cost.work import FloatArray
from meshwright.spec.optimizer import Muon

_Key = tuple[tuple[int, ...], bool, bool, int, int | None]
_Shape = tuple[int, int, int]


@dataclass(slots=True)
class _Dealt:
    """Matrices of one shape that every rank has a part of, shape (rows, ranks), and among how many ranks they are dealt
    in turn, shape (rows, 1); the rank with one more than others decides."""

    number: FloatArray
    sharing: FloatArray

    @property
    def most(self) -> FloatArray:
        return np.asarray(np.ceil(self.number / self.sharing - 1e-9))


@dataclass(slots=True)
class _Matrices:
    """Those that are dealt by what they have in common, and bytes that shards and tensor ranks send each way, shape
    (rows, ranks)."""

    over_shards: FloatArray
    over_tensor: FloatArray
    dealt: dict[_Key, _Dealt] = field(default_factory=dict)


def orthogonal_seconds(found: Optimized, figures: UpdateRates) -> FloatArray:
    """Seconds of one step, shape (rows, ranks)."""
    matrices, like = _matrices(found), np.ones(len(found.table))
    seconds = np.zeros_like(matrices.over_shards)
    for key, entry in matrices.dealt.items():
        once = sum((product_seconds(*_as_rows(shape, like), figures.products) for shape in _products(key)), 0.0 * like)
        seconds = seconds + entry.most * (key[3] * once)[:, None]
    shards, tensor = matrices.over_shards, matrices.over_tensor
    sharded = (found.table.sharding > 0)[:, None]
    seconds = seconds + np.where(sharded & (shards > 0.0), 2.0 * figures.over_shards.seconds(shards), 0.0)
    return np.asarray(seconds + np.where(tensor > 0.0, 2.0 * figures.over_tensor.seconds(tensor), 0.0))


def orthogonal_flops(found: Optimized) -> FloatArray:
    """FLOPs of one step, shape (rows, ranks)."""
    matrices = _matrices(found)
    flops = np.zeros_like(matrices.over_shards)
    for key, entry in matrices.dealt.items():
        flops = flops + entry.most * key[3] * sum(2.0 * m * n * k for m, n, k in _products(key))
    return flops


def _products(key: _Key) -> tuple[_Shape, _Shape, _Shape]:
    """The (m, n, k) of one of its steps: the matrix times itself, that squared, and their sum times the matrix."""
    m, n = min(key[0]), max(key[0])
    return (m, m, n), (m, m, m), (m, n, m)


def _as_rows(shape: _Shape, like: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    m, n, k = shape
    return m * like, n * like, k * like


def _matrices(found: Optimized) -> _Matrices:
    compute, total = state_bytes(found.table).compute, found.counts["total"]
    zeros = np.zeros(total.shape[:2])
    matrices = _Matrices(zeros, zeros)
    for index, kind in enumerate(found.arrays.kinds):
        for entry in found.held(kind):
            if not isinstance(entry.rule, Muon):
                continue
            number, divided = total[..., index] * entry.share, entry.tensor.divided is not None
            key = (entry.tensor.shape[-2:], divided, entry.is_stack, entry.rule.steps, kind.shards)
            dealt = matrices.dealt.setdefault(key, _Dealt(zeros, entry.sharing[:, None]))
            dealt.number = dealt.number + number * entry.stack[:, None]
            sent = number * (entry.local * compute)[:, None]
            matrices.over_shards = matrices.over_shards + (0.0 if entry.is_stack or kind.shards == 1 else sent)
            matrices.over_tensor = matrices.over_tensor + (sent if divided else 0.0)
    return matrices
