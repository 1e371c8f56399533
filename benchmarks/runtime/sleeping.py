"""Stages that sleep for known seconds in each pass, run by the real executor over real processes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.nn.context import Context, KnownAngles
from meshwright.nn.weights import Weighted
from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.parallel.split import WeightGradients
from meshwright.spec.plan import Plan


class Pause(torch.autograd.Function):
    """x after `forward` seconds; its gradient after `backward` seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class SleepingStage(Weighted):
    """One matrix of one element: seconds of a pass forward, of its input's gradient and of its matrix's."""

    def __init__(self, *, forward: float, input: float, weight: float, embeds: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        self.shift = nn.Parameter(torch.zeros(1)) if embeds else None
        self.seconds = (forward, input, weight)
        self.known_angles: KnownAngles = {}

    def forward(self, x: Tensor, *, documents: Tensor | None = None, context: Context | None = None) -> Tensor:
        if self.shift is not None:
            x = x[..., None] + self.shift
        forward, input, weight = self.seconds
        x = Pause.apply(x, forward, input)
        return self.multiply(x, Pause.apply(self.weight, 0.0, weight), None)


@dataclass
class Spans:
    """First start and last end of the passes of this rank."""

    start: float = float("inf")
    end: float = 0.0

    def record(self, name: str, start: float, seconds: float, *, stage: int = -1, microbatch: int = -1) -> None:
        if name in ("forward", "backward"):
            self.start, self.end = min(self.start, start), max(self.end, start + seconds)


def steps(plan: Plan, seconds: tuple[tuple[float, float, float], ...], count: int) -> list[tuple[float, float]]:
    """(first start, last end) of this rank for each of `count` steps after one that is not told.

    `seconds[stage]` are those of a whole microbatch forward, of the input's half and of the weights' half.
    """
    slices, rank = plan.schedule.slices, dist.get_rank()
    parts = []
    for index in plan.stages_of(rank):
        forward, input, weight = (each / slices for each in seconds[index])
        parts.append(SleepingStage(forward=forward, input=input, weight=weight, embeds=index == 0))
    spans = Spans()
    executor = PipelineExecutor(
        parts=parts,
        synchronizers=[BucketedGradients(part, groups=[]) for part in parts],
        weights=[WeightGradients([part]) for part in parts],
        plan=plan,
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        hidden=torch.empty(plan.microbatch, plan.sequence_length // slices, 1, device="meta"),
        loss_function=lambda logits, _: logits.sum(),
        recorder=spans,
    )
    tokens = torch.zeros(plan.batch, plan.sequence_length, dtype=torch.int64)
    found = []
    for step in range(count + 1):
        dist.barrier()
        spans.start, spans.end = float("inf"), 0.0
        executor.step(tokens, tokens)
        if step:
            found.append((spans.start, spans.end))
    return found
