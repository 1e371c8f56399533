"""The work of state-space and linear-attention mixers, kernel by kernel, as the published kernels do it in chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.norm_work import norm_parameters
from meshwright.cost.work import PAIR, FloatArray, Kernel, PartWork, Product, Scan, Sizes
from meshwright.spec.model import Recurrence

RECURRENCE = "recurrence"
_NORMS = ("norm", "norm back")
_KERNELS = 14.0  # that one starts forward: products, the convolution, the scan and what lies around them

_WIDE = 4.0  # bytes of an element in fp32
_CHUNK = 128.0  # tokens that Mamba-2 takes at once in Megatron (mamba_mixer.py) and in Nemotron's configurations
_DELTA_CHUNK = 64.0  # tokens that the delta rule takes at once (flash-linear-attention's chunk_gated_delta_rule)
_TILE = 64.0  # rows of a tile of scores: a causal chunk is worked out to the end of its tiles

# Seconds of a chunk's states after those of the last chunk, forward and backward: 4 and 8 heads of one long sequence
# against several short ones on H200 (QwenLM/FlashQLA@c18a486 benchmark/benchmark_results_H200.txt, Triton's columns).
_DELTA_STEP, _DELTA_STEP_BACK = 1.1e-6, 1.7e-6

# FLOPs that kernels reach for each that the vector units could do in fp32, where bytes take less: every score is
# weighed by its decay between two products. 1.2 to 1.7 in those tables of H200 and GB200, forward and backward; 1.3 to
# 1.6 of Mamba-2 forward on H100 (vllm-project/vllm pull 27299, 8,192 to 131,072 tokens).
_REACH = 1.4
# Mamba-2's own kernels of backward: what training 1.3B leaves to them, 0.91 on A100, 0.54 on H200 and 0.51 on GB200
# (state-spaces/mamba issue 904).
_SCAN_BACK = 0.63


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Of a token on a rank: `inner` features of `heads`, `shared` features of the keys (and of the queries) of its
    groups, `scores` with the tokens of its chunk, one for each group; `chunks` in a sequence; `item` bytes of an
    activation."""

    inner: FloatArray
    shared: FloatArray
    heads: FloatArray
    state: float
    chunk: float
    chunks: float
    scores: FloatArray
    item: FloatArray

    @property
    def states(self) -> FloatArray:
        """Elements of the states at the ends of chunks, as many for each token."""
        return self.inner * self.state / self.chunk

    @property
    def mixed(self) -> FloatArray:
        """Features that the short convolution takes."""
        return self.inner + 2.0 * self.shared

    @property
    def once(self) -> FloatArray:
        """FLOPs of a product between every feature and its state."""
        return 2.0 * self.inner * self.state

    @property
    def causal(self) -> FloatArray:
        """FLOPs of a product between scores and features, hidden tiles left out."""
        return self.inner * (self.chunk + _TILE)


def recurrence_work(mixer: Recurrence, sizes: Sizes) -> PartWork:
    """Inner features and groups are divided over tensor ranks; what is between the products meets no other rank."""
    m, t, e = sizes.tokens, sizes.tensor, sizes.itemsize
    w = sizes.zeros + mixer.width
    shapes = recurrence_shapes(mixer, sizes)
    forward, backward = (
        tuple(replace(kernel, flops=m * kernel.flops, bytes=m * kernel.bytes) for kernel in kernels(mixer, sizes))
        for kernels in (forward_kernels, backward_kernels)
    )
    residual = 3.0 * e * m * w / sizes.split
    return PartWork(
        name=RECURRENCE,
        parameters=(mixer.parameters - norm_parameters(mixer)) / t,
        products=(
            Product(m=m, n=2.0 * shapes.inner + 2.0 * shapes.shared + mixer.steers * shapes.heads, k=w),
            Product(m=m, n=w, k=shapes.inner),
        ),
        score_flops=np.asarray(sum(kernel.flops for kernel in forward)),
        scan=Scan(forward=forward, backward=backward),
        traffic=residual,
        backward_traffic=(3.0 if sizes.eager else 1.5) * residual,
        kernels=_KERNELS,
        exchanges=PAIR,
        closes=mixer.post_norm is None,
        traded=e * m * (2.0 * shapes.inner + shapes.mixed),
    )


def forward_kernels(mixer: Recurrence, sizes: Sizes) -> tuple[Kernel, ...]:
    """For one token, between the first and the last product of the mixer, in order."""
    shapes = recurrence_shapes(mixer, sizes)
    rule = _delta_forward(shapes) if mixer.delta else _scan_forward(shapes)
    return (*_laid_out(shapes, sizes), _convolution(shapes), *_normed(mixer, rule))


def backward_kernels(mixer: Recurrence, sizes: Sizes) -> tuple[Kernel, ...]:
    """For one token, between the same products: what forward kept no copy of is worked out again."""
    shapes = recurrence_shapes(mixer, sizes)
    rule = _delta_backward(shapes) if mixer.delta else _scan_backward(shapes)
    back = Kernel(name="convolution back", bytes=3.0 * shapes.item * shapes.mixed)
    return (*_laid_out(shapes, sizes), _convolution(shapes), *_normed(mixer, rule), back)


def _normed(mixer: Recurrence, rule: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The kernels of `rule`, without those of a norm that the mixer has not."""
    return rule if mixer.output_norm else tuple(kernel for kernel in rule if kernel.name not in _NORMS)


def recurrence_shapes(mixer: Recurrence, sizes: Sizes) -> Shapes:
    """Of tensor ranks each has one group at the least."""
    groups = np.maximum(mixer.groups / sizes.tensor, 1.0)
    chunk = min(_DELTA_CHUNK if mixer.delta else _CHUNK, sizes.sequence)
    return Shapes(
        inner=mixer.inner / sizes.tensor,
        shared=groups * mixer.state,
        heads=mixer.heads / sizes.tensor,
        state=float(mixer.state),
        chunk=chunk,
        chunks=math.ceil(sizes.sequence / chunk),
        scores=groups * chunk,
        item=sizes.itemsize,
    )


def _laid_out(shapes: Shapes, sizes: Sizes) -> tuple[Kernel, ...]:
    """Several sequences whose tokens lie beside one another are laid out one by one, and back after the scan."""
    if not sizes.tokens_first:
        return ()
    moved = 3.0 * shapes.inner + 2.0 * shapes.shared + shapes.heads
    return (Kernel(name="layout", bytes=np.where(sizes.batch > 1.0, 2.0 * shapes.item * moved, 0.0)),)


def _convolution(shapes: Shapes) -> Kernel:
    return Kernel(name="convolution", bytes=2.0 * shapes.item * shapes.mixed)


def _scores(shapes: Shapes) -> Kernel:
    """Queries by keys of the whole square of a chunk, once for the heads of a group, written in fp32."""
    s = shapes
    return Kernel(
        name="scores", flops=2.0 * s.shared * s.chunk, reach=_REACH, bytes=2.0 * s.item * s.shared + _WIDE * s.scores
    )


def _chunk_states(shapes: Shapes) -> Kernel:
    s = shapes
    return Kernel(name="states", flops=s.once, reach=_REACH, bytes=s.item * (s.inner + s.shared) + _WIDE * s.states)


def _steps(shapes: Shapes) -> Kernel:
    """Sums of steps within a chunk, in fp32."""
    return Kernel(name="steps", bytes=(shapes.item + 2.0 * _WIDE) * shapes.heads)


def _scan_forward(shapes: Shapes) -> tuple[Kernel, ...]:
    """Mamba-2 (2405.21060) as state-spaces/mamba has it at e9594ce (ssd_combined.py), its gate in the scan and the
    grouped norm after it, as in Megatron's mixer."""
    s, e = shapes, shapes.item
    scan = e * (4.0 * s.inner + s.shared + s.states) + _WIDE * s.scores
    return (
        _steps(s),
        _chunk_states(s),
        Kernel(name="passing", bytes=(_WIDE + e) * s.states),
        _scores(s),
        Kernel(name="scan", flops=s.once + s.causal, reach=_REACH, bytes=scan),
        Kernel(name="norm", bytes=2.0 * e * s.inner),
    )


def _scan_backward(shapes: Shapes) -> tuple[Kernel, ...]:
    """States are worked out again and passed on in fp32; gradients of keys and queries are written in fp32, summed over
    the programs that share a group, and added to those that come through the scores."""
    s, e = shapes, shapes.item
    key = e * (s.inner + s.shared + s.states) + 3.0 * _WIDE * s.shared
    decays = e * 2.0 * s.inner + _WIDE * (s.scores + 2.0 * s.heads * s.chunk / _TILE)
    return (
        Kernel(name="norm back", bytes=3.0 * e * s.inner),
        _steps(s),
        _scores(s),
        _chunk_states(s),
        Kernel(name="passing", bytes=2.0 * _WIDE * s.states),
        Kernel(name="gate back", bytes=6.0 * e * s.inner),
        Kernel(name="states back", flops=s.once, reach=_SCAN_BACK, bytes=e * (s.inner + s.shared) + _WIDE * s.states),
        Kernel(name="passing back", bytes=2.0 * (_WIDE + e) * s.states),
        Kernel(
            name="features back",
            flops=s.once + s.causal,
            reach=_SCAN_BACK,
            bytes=e * (3.0 * s.inner + s.shared + s.states) + _WIDE * s.scores,
        ),
        Kernel(name="keys back", flops=s.once, reach=_SCAN_BACK, bytes=key),
        Kernel(name="queries back", flops=s.once, reach=_SCAN_BACK, bytes=key),
        Kernel(name="scores back", flops=s.causal, reach=_SCAN_BACK, bytes=2.0 * e * s.inner + 3.0 * _WIDE * s.scores),
        Kernel(
            name="keys and queries of scores",
            flops=4.0 * s.shared * s.chunk,
            reach=_SCAN_BACK,
            bytes=2.0 * _WIDE * s.scores + 2.0 * (2.0 * e + _WIDE) * s.shared,
        ),
        Kernel(name="decays back", flops=s.causal, reach=_SCAN_BACK, bytes=decays),
        Kernel(name="steps back", bytes=10.0 * _WIDE * s.heads),
    )


def _delta_forward(shapes: Shapes) -> tuple[Kernel, ...]:
    """The gated delta rule (2412.06464) as flash-linear-attention has it at bc3b101 (ops/gated_delta_rule): every head
    reads the keys and queries of its group; a chunk's corrections are solved, then applied to states in turn."""
    s, e = shapes, shapes.item
    key, within = s.heads * s.state, s.heads * s.chunk
    return (
        Kernel(name="norms of keys and queries", bytes=4.0 * e * s.shared),
        _steps(s),
        Kernel(name="solve", flops=s.chunk * key, reach=_REACH, bytes=e * (key + within)),
        *_corrected(s),
        Kernel(
            name="output",
            flops=s.once + 2.0 * s.chunk * (key + s.inner),
            reach=_REACH,
            bytes=e * (2.0 * key + 2.0 * s.inner + s.states),
        ),
        Kernel(name="gate and norm", bytes=3.0 * e * s.inner),
    )


def _corrected(shapes: Shapes) -> tuple[Kernel, ...]:
    """Keys and values that a chunk's solved matrix corrects, and the states that they leave."""
    s, e = shapes, shapes.item
    key, within = s.heads * s.state, s.heads * s.chunk
    return (
        Kernel(
            name="corrections",
            flops=2.0 * s.chunk * (key + s.inner),
            reach=_REACH,
            bytes=e * (within + 2.0 * (key + s.inner)),
        ),
        Kernel(
            name="states",
            flops=2.0 * s.once,
            reach=_REACH,
            bytes=e * (2.0 * key + 2.0 * s.inner + s.states),
            least=s.chunks * _DELTA_STEP,
        ),
    )


def _delta_backward(shapes: Shapes) -> tuple[Kernel, ...]:
    """Corrections and states are worked out again; gradients of keys and queries are summed over a group's heads."""
    s, e = shapes, shapes.item
    key, within = s.heads * s.state, s.heads * s.chunk
    square = 2.0 * s.chunk * key
    return (
        Kernel(name="gate and norm back", bytes=5.0 * e * s.inner),
        *_corrected(s),
        Kernel(
            name="values back",
            flops=square + 2.0 * s.chunk * s.inner,
            reach=_REACH,
            bytes=e * (2.0 * key + 2.0 * s.inner),
        ),
        Kernel(
            name="states back",
            flops=3.0 * s.once,
            reach=_REACH,
            bytes=e * (3.0 * key + 3.0 * s.inner + s.states),
            least=s.chunks * _DELTA_STEP_BACK,
        ),
        Kernel(
            name="keys and queries back",
            flops=4.0 * s.once + 2.0 * square + 2.0 * s.chunk * s.inner,
            reach=_REACH,
            bytes=e * (5.0 * key + 3.0 * s.inner + 2.0 * s.states),
        ),
        Kernel(
            name="corrections back",
            flops=5.0 * square + 4.0 * s.chunk * s.inner + 4.0 * s.chunk * within,
            reach=_REACH,
            bytes=e * (within + 3.0 * (key + s.inner)),
        ),
        Kernel(name="sums over groups", bytes=e * (5.0 * key + 2.0 * s.shared)),
        _steps(s),
        Kernel(name="norms of keys and queries back", bytes=6.0 * e * s.shared),
    )
