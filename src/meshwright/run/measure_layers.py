"""The operators of a real decoder timed as they run, kind by kind: what products and scores lose beside each other.

An operator timed alone finds its operands in cache and its pages mapped; in a step it seldom does.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshwright.run.allocator import keep_freed_memory
from meshwright.spec.cluster import Precision
from meshwright.spec.model import Attention, Embedding, FeedForward, Head, Layer, ModelSpec, Norm, Rotary

SEQUENCE = 256
BATCHES = 8
_LEAST_PASSES = 4  # the first is not counted
_LONGEST_PASS_SECONDS = 3.0  # of BATCHES sequences; where a precision has no arithmetic of its own, one has to do


class Kind(StrEnum):
    """What an operator is to the cost model."""

    PRODUCT = "product"
    SCORES = "scores"
    ELEMENT = "element"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Lower quartiles of seconds of a forward and backward of `layered_model` over `sequences` of SEQUENCE tokens."""

    precision: Precision
    sequences: int = BATCHES
    product_seconds: float
    scores_seconds: float
    element_seconds: float


def layered_model() -> ModelSpec:
    """A small Llama-style model in whose steps no kind of operator is rare."""
    width, heads, vocab, layers = 256, 8, 4096, 4
    norm = Norm(width=width)
    mixer = Attention(width=width, heads=heads, kv_heads=heads, head_dim=32, norm=norm, rotary=Rotary(dims=32))
    layer = Layer(mixer=mixer, transform=FeedForward(width=width, hidden=2 * width, norm=norm))
    return ModelSpec(
        name=f"layers-{layers}",
        embedding=Embedding(vocab=vocab, width=width),
        layers=(layer,) * layers,
        head=Head(vocab=vocab, width=width, norm=norm),
        max_positions=SEQUENCE,
    )


def layered_pass(precision: Precision, *, batch: int) -> Callable[[], None]:
    """One forward and backward of `layered_model` over `batch` sequences, as a call."""
    import torch

    from meshwright import nn

    model = layered_model()
    decoder = nn.Decoder(model)
    nn.initialize(decoder, seed=0)
    decoder = decoder.to({Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}[precision])
    tokens = torch.arange(batch * SEQUENCE).view(batch, SEQUENCE) % model.vocab

    def both_ways() -> None:
        nn.token_losses(decoder(tokens), tokens).mean().backward()
        decoder.zero_grad()

    return both_ways


def time_layers(precision: Precision, *, seconds: float) -> LayerTimes:
    """Takes about `seconds`, on a processor: an accelerator runs behind the host, whose clock would not see it.

    Over BATCHES sequences, or one where that would be slow.
    """
    from meshwright.train.torch_compat import TorchDispatchMode

    sums: dict[Kind, float] = defaultdict(float)

    class Timer(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            start = time.perf_counter()
            result = func(*args, **(kwargs or {}))
            sums[_kind(func.overloadpacket.__name__)] += time.perf_counter() - start
            return result

    sequences = BATCHES if _seconds_of(layered_pass(precision, batch=1)) * BATCHES <= _LONGEST_PASS_SECONDS else 1
    both_ways = layered_pass(precision, batch=sequences)
    found: list[dict[Kind, float]] = []
    deadline = time.perf_counter() + seconds
    while len(found) < _LEAST_PASSES or time.perf_counter() < deadline:
        sums.clear()
        with Timer():
            both_ways()
        found.append(dict(sums))
    quarter = (len(found) - 1) // 4
    product, scores, element = (sorted(step[kind] for step in found[1:])[quarter] for kind in Kind)
    return LayerTimes(
        precision=precision,
        sequences=sequences,
        product_seconds=product,
        scores_seconds=scores,
        element_seconds=element,
    )


def _seconds_of(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_scaling(*, precision: Precision, threads: tuple[int, ...], seconds: float) -> tuple[float, ...]:
    """Median seconds of a pass with each number of threads, taken in turn as the machine may change its pace.

    Takes about `seconds`; call it in a process of its own.
    """
    import torch

    keep_freed_memory()
    both_ways = layered_pass(precision, batch=BATCHES)
    found: list[list[float]] = [[] for _ in threads]
    deadline = time.perf_counter() + seconds
    while len(found[0]) < _LEAST_PASSES or time.perf_counter() < deadline:
        for count, spent in zip(threads, found, strict=True):
            torch.set_num_threads(count)
            both_ways()
            spent.append(_seconds_of(both_ways))
    return tuple(statistics.median(spent) for spent in found)


def _kind(name: str) -> Kind:
    if "attention" in name:
        return Kind.SCORES
    return Kind.PRODUCT if name in ("mm", "addmm", "bmm", "baddbmm", "linear") else Kind.ELEMENT
