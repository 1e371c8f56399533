"""What one device does in a second: products, copies, attention, small layers, the optimizer. Runs in a child."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from meshwright.run.allocator import keep_freed_memory
from meshwright.run.measure_layers import LayerTimes, time_layers
from meshwright.run.timing import timed
from meshwright.spec.cluster import Precision
from meshwright.spec.model import Attention, Embedding, FeedForward, Head, Layer, ModelSpec, Norm, Rotary

# (m, k, n) of products as training makes them: few and many tokens, narrow and wide, and the head's wide output.
MATRIX_SHAPES: tuple[tuple[int, int, int], ...] = (
    (64, 128, 128),
    (256, 128, 384),
    (256, 256, 256),
    (512, 256, 768),
    (512, 768, 256),
    (256, 512, 512),
    (1024, 512, 512),
    (512, 256, 4096),
    (1024, 1024, 1024),
    (2048, 512, 1536),
    (256, 1536, 512),
)
# Sequence lengths and head dims of causal attention, over ATTENTION_TOKENS tokens in ATTENTION_HEADS heads.
ATTENTION_LENGTHS = (128, 256, 512, 1024)
ATTENTION_DIMS = (32, 64)
ATTENTION_TOKENS, ATTENTION_HEADS = 1024, 4
OPTIMIZER_PARAMETERS = (2**18, 2**22)
COPY_BYTES = 2**26
NARROW_TOKENS = 16
# While time is left, everything is measured so often and the middle of each figure counts: machines change pace.
ROUNDS = 3
_ROUND_SECONDS = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixTime:
    """Seconds of one product (m, k) x (k, n)."""

    precision: Precision
    m: int
    k: int
    n: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTime:
    """Seconds of causal attention forward and backward; `flops` forward, over the keys the mask shows."""

    precision: Precision
    length: int
    head_dim: int
    flops: float
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """All that one device was asked, with `threads` threads. Bandwidths count bytes read and written."""

    threads: int
    matrices: tuple[MatrixTime, ...]
    attention: tuple[AttentionTime, ...] = ()
    layers: tuple[LayerTimes, ...] = ()
    copy_bytes_per_second: float = 0.0
    optimizer_bytes_per_second: float = 0.0
    launch_seconds: float = 0.0
    layer_forward_seconds: float = 0.0
    layer_backward_seconds: float = 0.0
    step_overhead_seconds: float = 0.0
    seconds: float = 0.0


def measure_device(*, threads: int, precisions: tuple[Precision, ...], seconds: float, device: str) -> DeviceTimes:
    """The times of `device` with `threads` threads of this process, taking about `seconds`. Call it in a child."""
    began = time.perf_counter()
    import torch

    if device == "cpu":
        torch.set_num_threads(threads)
        keep_freed_memory()
    turns = ROUNDS if seconds >= ROUNDS * _ROUND_SECONDS else 1
    rounds = [_round(_Probe(device=device, budget=seconds / turns), precisions)]
    while len(rounds) < turns and time.perf_counter() - began < seconds:
        rounds.append(_round(_Probe(device=device, budget=seconds / turns), precisions))
    middle: DeviceTimes = _median(rounds)
    return replace(middle, threads=threads, seconds=time.perf_counter() - began)


def _round(probe: _Probe, precisions: tuple[Precision, ...]) -> DeviceTimes:
    """Everything once, in the probe's budget; attention and whole layers only where nothing runs behind the host."""
    beside = precisions if probe.on_processor else ()
    forward, backward, step = probe.layer_overhead(share=0.15)
    return DeviceTimes(
        threads=1,
        matrices=tuple(time_ for precision in precisions for time_ in probe.matrices(precision, share=0.2)),
        attention=tuple(time_ for precision in beside for time_ in probe.attention(precision, share=0.1)),
        layers=tuple(probe.layers(precision, share=0.1) for precision in beside),
        copy_bytes_per_second=probe.copy(share=0.05),
        optimizer_bytes_per_second=probe.optimizer(share=0.06),
        launch_seconds=probe.launch(share=0.03),
        layer_forward_seconds=forward,
        layer_backward_seconds=backward,
        step_overhead_seconds=step,
    )


def _median(values: Sequence[Any]) -> Any:
    """The median of numbers; of equal structures, that of every number inside them."""
    first = values[0]
    if isinstance(first, float):
        return statistics.median(values)
    if isinstance(first, tuple):
        return tuple(_median(entries) for entries in zip(*values, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        return replace(
            first, **{field.name: _median([getattr(v, field.name) for v in values]) for field in fields(first)}
        )
    return first


def tiny_model(*, layers: int, width: int = 16, vocab: int = 32) -> ModelSpec:
    """A Llama-style model so narrow that its layers cost the host more than the arithmetic."""
    norm = Norm(width=width)
    heads = max(1, width // 32)
    mixer = Attention(
        width=width, heads=heads, kv_heads=heads, head_dim=width // heads, norm=norm, rotary=Rotary(dims=width // heads)
    )
    layer = Layer(mixer=mixer, transform=FeedForward(width=width, hidden=3 * width, norm=norm))
    return ModelSpec(
        name=f"narrow-{layers}",
        embedding=Embedding(vocab=vocab, width=width),
        layers=(layer,) * layers,
        head=Head(vocab=vocab, width=width, norm=norm),
        max_positions=64,
    )


class _Probe:
    """Runs the single measurements on one device; each may take its share of the budget."""

    def __init__(self, *, device: str, budget: float) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._budget = budget
        self.on_processor = device == "cpu"
        self._finish: Callable[[], object] | None = torch.cuda.synchronize if device.startswith("cuda") else None

    def _time(self, call: Callable[[], object], *, seconds: float) -> float:
        return timed(call, seconds=seconds, finish=self._finish)

    def dtype(self, precision: Precision):  # type: ignore[no-untyped-def]  # torch is imported in the child only
        torch = self._torch
        return {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}[precision]

    def matrices(self, precision: Precision, *, share: float) -> list[MatrixTime]:
        """Products as a linear layer makes them, in the layouts of its forward, data gradient and weight gradient."""
        torch, found = self._torch, []
        each = share * self._budget / len(MATRIX_SHAPES) / 3

        def add(m: int, k: int, n: int, call: Callable[[], object]) -> None:
            seconds = self._time(call, seconds=each)
            found.append(MatrixTime(precision=precision, m=m, k=k, n=n, seconds=seconds))

        for m, k, n in MATRIX_SHAPES:
            x, weight, grad = (
                torch.randn(shape, device=self._device, dtype=self.dtype(precision))
                for shape in ((m, k), (n, k), (m, n))
            )
            add(m, k, n, partial(torch.nn.functional.linear, x, weight))
            add(m, n, k, partial(torch.matmul, grad, weight))
            add(n, m, k, partial(torch.matmul, grad.t(), x))
        return found

    def attention(self, precision: Precision, *, share: float) -> list[AttentionTime]:
        torch, found = self._torch, []
        each = share * self._budget / len(ATTENTION_LENGTHS) / len(ATTENTION_DIMS) / 2
        attend = torch.nn.functional.scaled_dot_product_attention
        for length, dim in product(ATTENTION_LENGTHS, ATTENTION_DIMS):
            batch = ATTENTION_TOKENS // length
            shape = (batch, length, ATTENTION_HEADS, dim)
            q, k, v = (
                torch.randn(shape, device=self._device, dtype=self.dtype(precision)).transpose(1, 2).requires_grad_()
                for _ in range(3)
            )
            forward = self._time(partial(attend, q, k, v, is_causal=True), seconds=each)
            out = attend(q, k, v, is_causal=True)
            ones = torch.ones_like(out)
            backward = self._time(
                partial(torch.autograd.grad, out, (q, k, v), ones, retain_graph=True),
                seconds=each,
            )
            visible = batch * ATTENTION_HEADS * length * (length + 1) / 2
            found.append(
                AttentionTime(
                    precision=precision,
                    length=length,
                    head_dim=dim,
                    flops=4.0 * dim * visible,
                    forward_seconds=forward,
                    backward_seconds=backward,
                )
            )
        return found

    def layers(self, precision: Precision, *, share: float) -> LayerTimes:
        return time_layers(precision, seconds=share * self._budget)

    def copy(self, *, share: float) -> float:
        """Bytes/s of a copy that no cache holds, read and written."""
        source = self._torch.ones(COPY_BYTES // 4, device=self._device)
        target = self._torch.empty_like(source)
        seconds = self._time(lambda: target.copy_(source), seconds=share * self._budget)
        return 2 * COPY_BYTES / seconds

    def optimizer(self, *, share: float) -> float:
        """Bytes/s of a fused AdamW step at 28 bytes a parameter, over tensors of a layer's and an embedding's size."""
        torch = self._torch
        parameters = [
            torch.nn.Parameter(torch.randn(size, device=self._device))
            for size in (*OPTIMIZER_PARAMETERS[:1] * 8, OPTIMIZER_PARAMETERS[1])
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, fused=True)
        count = sum(parameter.numel() for parameter in parameters)
        return float(28 * count) / self._time(optimizer.step, seconds=share * self._budget)

    def launch(self, *, share: float) -> float:
        """Host seconds of one small operator under autograd."""
        x = self._torch.ones(8, device=self._device, requires_grad=True)

        def many() -> None:
            y = x
            for _ in range(100):
                y = y * 1.0

        return timed(many, seconds=share * self._budget) / 100

    def layer_overhead(self, *, share: float) -> tuple[float, float, float]:
        """Seconds of a narrow layer forward, backward, and of a step without layers: what the host costs."""
        shallow, deep = 2, 8
        times = {layers: self._narrow(layers, seconds=share * self._budget / 4) for layers in (shallow, deep)}
        per_layer = [(times[deep][index] - times[shallow][index]) / (deep - shallow) for index in range(2)]
        forward, backward = (max(seconds, 0.0) for seconds in per_layer)
        rest = sum(times[shallow]) - shallow * (forward + backward)
        return forward, backward, max(rest, 0.0)

    def _narrow(self, layers: int, *, seconds: float) -> tuple[float, float]:
        from meshwright import nn

        torch = self._torch
        model = nn.Decoder(tiny_model(layers=layers)).to(self._device)
        nn.initialize(model, seed=0)
        tokens = torch.zeros(1, NARROW_TOKENS, dtype=torch.int64, device=self._device)
        forward = self._time(lambda: model(tokens), seconds=seconds)

        def both() -> None:
            model(tokens).sum().backward()
            model.zero_grad()

        return forward, max(self._time(both, seconds=seconds) - forward, 0.0)
