"""The operators of every block for the slow simulator, written out one after the other for one device.

FLOPs are those of the products listed here and of the scores of keys that are counted query by query; bytes are what
each element-wise operator of eager torch reads and writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, erfc, sqrt

from meshwright.spec.blocks import Attention, Embedding, FeedForward, Head, Layer, Mixture, Norm, NormKind
from meshwright.spec.cluster import AttentionKernel, AttentionShare, DeviceSpec, Precision
from meshwright.spec.model import Block

HALF, SINGLE = 2.0, 4.0  # bytes of bf16 and of fp32


@dataclass(frozen=True)
class Local:
    """One device's share: `tokens` of a microbatch of `sequences`, over `tensor` ranks, of which `split` divide the
    tokens of norms; `experts` and `slices` are the expert grid (0: none)."""

    tokens: float
    sequences: float
    length: int
    tensor: int
    split: int
    context: int
    inner: int
    experts: int
    slices: int
    masked: bool

    @property
    def expert_slices(self) -> int:
        return self.slices if self.experts else self.tensor


@dataclass
class Work:
    """Seconds of one block on its device and what it exchanges, in bytes.

    `hidden_forward` and `hidden_backward` count exchanges of the whole hidden features over tensor ranks, by name.
    """

    forward: float = 0.0
    backward: float = 0.0
    core_forward: float = 0.0
    core_backward: float = 0.0
    kernels: float = 0.0
    met: tuple[float, float] = (0.0, 0.0)
    matrices: int = 0
    flops: float = 0.0
    dense: float = 0.0
    on_grid: float = 0.0
    kept: float = 0.0
    kept_core: float = 0.0
    hidden_bytes: float = 0.0
    hidden_forward: list[str] = field(default_factory=list)
    hidden_backward: list[str] = field(default_factory=list)
    statistics: int = 0
    keys: float = 0.0
    heads_out: float = 0.0
    routed: float = 0.0
    gathered: float = 0.0


@lru_cache(maxsize=32)
def keys_seen(length: int, window: int | None, block: int = 0) -> int:
    """Keys that the causal queries of one sequence meet, counted one query after the other.

    A kernel that works on `block` rows and columns at a time meets all keys of each block that it touches.
    """
    met = 0
    side = block or 1
    for query in range(length):
        last = min((query // side + 1) * side, length)
        first = max(query // side * side - (window or length) + 1, 0) // side * side if window else 0
        met += last - first if block else min(query + 1, window or length)
    return met


@lru_cache(maxsize=32)
def last_of(count: int) -> float:
    """The mean of the largest of so many standard normals: the chance that it is above x, summed over x."""
    grid = [step / 200.0 for step in range(-1600, 1600)]
    under = [(0.5 * erfc(-x / sqrt(2.0))) ** count for x in grid]
    return sum((1.0 - chance) if x >= 0.0 else -chance for x, chance in zip(grid, under, strict=True)) / 200.0


class Bench:
    """What operators take in bf16 on one device, the slowest of so many that work `together`."""

    def __init__(self, device: DeviceSpec, together: int = 1) -> None:
        self.device = device
        self.bandwidth = device.memory_bandwidth * device.memory_fraction
        self.peak = device.peak_flops[Precision.BF16] / (1.0 + device.spread * last_of(together))
        self.curve = device.matrix[Precision.BF16]

    def product(self, m: float, n: float, k: float, beside: float = 1.0) -> float:
        """Of one product, while `beside` of them share the device's units."""
        floor = HALF * (m * k + k * n + m * n) / self.bandwidth
        curve, tiles = self.curve, self.device.tiles
        if tiles is None:
            reached = curve.fraction * m / (m + curve.half_m) * n / (n + curve.half_n) * k / (k + curve.half_k)
            return max(2 * m * n * k / (self.peak * reached), floor)
        return max(min(self._tiled(m, n, k, beside, size) for size in tiles.sizes), floor)

    def _tiled(self, m: float, n: float, k: float, beside: float, size: tuple[int, int]) -> float:
        """Waves of tiles, one on every unit at a time; rows and columns beyond the result are made all the same."""
        tiles = self.device.tiles

        def elements(rows: int, columns: int) -> float:
            return (rows + tiles.load) * (columns + tiles.load) - tiles.load**2

        rows, columns = tiles.sizes[0]
        unit = self.peak * self.curve.fraction / tiles.units * elements(rows, columns) / (rows * columns)
        steps = ceil(k / tiles.step) * tiles.step + tiles.depth
        wave = 2 * steps * elements(*size) / unit
        wave += tiles.store * HALF * tiles.units * size[0] * size[1] / self.bandwidth
        filled = beside * ceil(m / size[0]) * ceil(n / size[1]) / tiles.units
        return max(1.0, filled + tiles.tail * (ceil(filled) - filled)) * wave / beside

    def linear(self, work: Work, m: float, n: float, k: float, *, times: float = 1.0, beside: float = 1.0) -> None:
        """A product forward, and backward one for its input and one for its weight."""
        work.forward += times * self.product(m, n, k, beside)
        work.backward += times * (self.product(m, k, n, beside) + self.product(k, n, m, beside))
        work.flops += times * 2 * m * n * k

    def touch(self, work: Work, forward: float, backward: float) -> None:
        """Bytes read and written by element-wise operators."""
        work.forward += forward / self.bandwidth
        work.backward += backward / self.bandwidth


def work_of(block: Block, at: Local, bench: Bench) -> Work:
    work = Work()
    if isinstance(block, Embedding):
        _embedding(block, at, bench, work)
    elif isinstance(block, Head):
        _head(block, at, bench, work)
    else:
        assert isinstance(block, Layer)
        work.hidden_bytes = HALF * at.tokens * (block.mixer or block.transform).width
        if block.mixer is not None:
            assert isinstance(block.mixer, Attention)
            _attention(block.mixer, at, bench, work)
        if isinstance(block.transform, FeedForward):
            _feed_forward(block.transform, at, bench, work)
        elif isinstance(block.transform, Mixture):
            _mixture(block.transform, at, bench, work)
    return work


def _norm(norm: Norm | None, at: Local, bench: Bench, work: Work) -> None:
    if norm is None:
        return
    size = HALF * at.tokens / at.split * norm.width
    bench.touch(work, 2 * size, 3 * size)
    work.kernels += 1.0 if norm.kind is NormKind.LAYER else 2.0
    work.dense += norm.width * (2 if norm.kind is NormKind.LAYER else 1)
    work.kept += size


def _both_ways(at: Local, work: Work) -> None:
    """A part begins with whole features and ends with sums over tensor ranks."""
    names = ["gather", "scatter"] if at.split > 1 else ["reduce"]
    work.hidden_forward += names
    work.hidden_backward += names


def _attention(part: Attention, at: Local, bench: Bench, work: Work) -> None:
    _norm(part.norm, at, bench, work)
    m, w = at.tokens, part.width
    heads, key_heads = part.heads / at.tensor, max(part.kv_heads / at.tensor, 1.0)
    query, key = heads * part.head_dim, key_heads * part.head_dim
    bench.linear(work, m, query, w)
    bench.linear(work, m, key, w, times=2)
    bench.linear(work, m, w, query)
    work.matrices += 4
    residual = 3 * HALF * m / at.split * w
    bench.touch(work, residual, 3 * residual)  # backward adds the gradients of three projections and the residual's
    if part.rotary is not None:  # cast, x cos, turn, x sin, add, cast
        turned = m * (query + key)
        bench.touch(work, turned * (2 * HALF + 2 * SINGLE + 4 * 2 * SINGLE), turned * 14 * SINGLE)
        work.kernels += 8
    work.kernels += 8
    scores = at.sequences * at.length**2 / at.context
    share = bench.device.attention_kernels.get(AttentionKernel.NATIVE)
    share = share or AttentionShare(
        forward=bench.device.attention_fraction, backward=bench.device.attention_backward_fraction
    )
    masked = at.masked and at.context == 1  # context ranks cut what is masked into tiles
    seen = scores if masked else at.sequences * keys_seen(at.length, part.window, share.block) / at.context
    flops = 2 * 2 * heads * part.head_dim * seen
    queries = heads * at.sequences * at.length / at.context
    idle = [half * share.block / max(queries, share.block) for half in (share.forward_half, share.backward_half)]
    work.core_forward += flops / (share.forward * bench.peak) * (1 + idle[0])
    work.core_backward += 2.5 * flops / (share.backward * bench.peak) * (1 + idle[1])
    work.flops += flops
    if masked:
        bench.touch(work, 2 * HALF * scores, 3 * HALF * scores)
        work.kept_core += HALF * scores
    work.dense += (w * (2 * query + 2 * key)) + (query + 2 * key if part.qkv_bias else 0) + (w * bool(part.output_bias))
    work.kept += HALF * m * (w + 2 * query + 2 * key) + SINGLE * m * heads
    work.kept_core += SINGLE * m * heads
    copies = max(at.inner / key_heads, 1.0)
    work.keys += HALF * m * 2 * key * copies
    work.heads_out += HALF * m * (2 * query + 2 * key * copies)
    if at.context > 1:
        _meet(part, at, bench, work, queries=m * query, keys=m * 2 * key * copies)
    _both_ways(at, work)


def _meet(part: Attention, at: Local, bench: Bench, work: Work, *, queries: float, keys: float) -> None:
    """Operators of blockwise attention, one after the other: what is whole first, then tile by tile."""
    runs = at.context // at.inner
    forward, backward = 4 * HALF * keys + (2 * HALF + SINGLE) * queries, 4 * HALF * keys + (HALF + SINGLE) * queries
    starts, starts_back = 6, 4
    for tile in range(runs):
        seen = 1.0 if tile == 0 else 0.75  # of another rank's tokens a half is hidden from one end or the other
        sums = 20 * queries / part.head_dim  # the log-sum-exp of a row and its weights
        forward += SINGLE * seen * (7 * queries + sums)
        backward += SINGLE * (keys + 3 * seen * (queries + keys))
        starts += 11
        starts_back += 5
        if tile:
            backward += SINGLE * 3 * keys
            starts += 1
            starts_back += 1
    if at.inner > 1:
        forward, backward = forward + 7 * work.heads_out, backward + 7 * work.heads_out
        starts, starts_back = starts + 7, starts_back + 7
    bench.touch(work, forward, backward)
    work.met = (starts, starts_back)


def _feed_forward(part: FeedForward, at: Local, bench: Bench, work: Work) -> None:
    _norm(part.norm, at, bench, work)
    _two_layers(part, at, bench, work)
    residual = 3 * HALF * at.tokens / at.split * part.width
    bench.touch(work, residual, residual * (2 if part.gated else 1))
    work.kernels += 6 if part.gated else 4
    _both_ways(at, work)


def _two_layers(part: FeedForward, at: Local, bench: Bench, work: Work) -> None:
    m, w, h = at.tokens, part.width, part.hidden / at.tensor
    first = 2 if part.gated else 1
    bench.linear(work, m, h, w, times=first)
    bench.linear(work, m, w, h)
    size = HALF * m * h
    # gated: silu reads and writes, the product reads two and writes one; backward: two products and one silu
    bench.touch(work, (5 if part.gated else 2) * size, (9 if part.gated else 3) * size)
    work.matrices += first + 1
    work.dense += (first + 1) * w * h + (first * h + w if part.bias else 0)
    work.kept += HALF * m * w + (4 if part.gated else 2) * size


def _mixture(part: Mixture, at: Local, bench: Bench, work: Work) -> None:
    _norm(part.norm, at, bench, work)
    m, w, h = at.tokens, part.width, part.hidden / at.expert_slices
    holders = at.experts or 1
    routed = m / at.tensor * part.top_k * at.expert_slices
    held = part.experts / holders
    busy = min(held, routed)
    bench.linear(work, m / at.tensor if at.experts else m, part.experts, w)
    bench.linear(work, routed / busy, h, w, times=busy * (2 if part.gated else 1), beside=busy)
    bench.linear(work, routed / busy, w, h, times=busy, beside=busy)
    rows, inner, residual = HALF * routed * w, HALF * routed * h, 3 * HALF * m / at.split * w
    # rows are gathered (2), weighted (2) and added where they belong (3); a row's gradient takes as many each way
    forward = 7 * rows + (5 if part.gated else 2) * inner + residual
    bench.touch(work, forward, 2 * forward)
    work.kernels += 24
    work.matrices += 4
    matrices = part.experts * w * part.hidden * (3 if part.gated else 2) / (at.expert_slices * holders)
    work.dense += w * part.experts + (0 if at.experts else matrices)
    work.on_grid += matrices if at.experts else 0
    # kept: a row as it was gathered, as its expert gave it, and as it was weighted
    work.kept += HALF * m * w + 3 * rows + (4 if part.gated else 2) * inner
    if part.shared is not None:
        _two_layers(part.shared, at, bench, work)
        bench.touch(work, HALF * m * w, HALF * m * w)
    if at.experts:
        work.routed += HALF * m / at.tensor * part.top_k * w
        work.gathered += rows
    if not at.experts or part.shared is not None:
        _both_ways(at, work)


def _embedding(block: Embedding, at: Local, bench: Bench, work: Work) -> None:
    size = HALF * at.tokens * block.width
    bench.touch(work, (4 if block.positions else 2) * size, 3 * size)
    work.kernels += 3 if block.positions else 2
    work.dense += (math.ceil(block.vocab / at.tensor) + block.positions) * block.width
    work.hidden_bytes = size
    work.hidden_forward = ["scatter"] if at.split > 1 else ["reduce"]
    work.hidden_backward = ["gather"] if at.split > 1 else []
    work.matrices += 2 if block.positions else 1


def _head(block: Head, at: Local, bench: Bench, work: Work) -> None:
    _norm(block.norm, at, bench, work)
    m, v = at.tokens, math.ceil(block.vocab / at.tensor)
    bench.linear(work, m, v, block.width)
    # largest, difference in fp32, exponential, sum; backward: difference, exponential, times the loss over the logits
    bench.touch(work, m * v * (2 + 6 + 8 + 4), m * v * (6 + 8 + 6))
    work.kernels += 8
    work.matrices += 1
    work.dense += 0 if block.tied else v * block.width
    work.kept += HALF * m * block.width
    work.hidden_bytes = HALF * m * block.width
    work.hidden_forward = ["gather"] if at.split > 1 else []
    work.hidden_backward = ["scatter"] if at.split > 1 else ["reduce"]
    work.statistics = 3
