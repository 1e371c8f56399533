"""Precision: which dtype keeps parameters and which one multiplies, the same in every layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.parallel.quantized import Recipe, recipe
from meshwright.parallel.wire import Wire
from meshwright.spec.cluster import Precision
from meshwright.spec.compression import Compression
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.optimizer import Master
from meshwright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """`master` keeps parameters, gradients and optimizer state; `compute` multiplies and carries hidden features.

    Where they differ, parameters are cast when they are read, and norms, softmax and losses work in fp32 inside.
    `reduce` carries gradients between data parallel ranks. `tf32` lets products of fp32 round their inputs, and
    `recipe` rounds those of layers' products to eight or four bits. Gradients travel in the eight bits of `wire`,
    or as `compression` says.
    """

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    tf32: bool = False
    recipe: Recipe | None = None
    wire: Wire | None = None
    compression: Compression | None = None

    @property
    def meets_whole(self) -> bool:
        """Gradients travel as they are, or in another dtype."""
        return self.wire is None and self.compression is None

    @property
    def casts(self) -> bool:
        return self.master is not self.compute

    @property
    def scales_losses(self) -> bool:
        """Small gradients would be lost in what multiplies."""
        return self.compute is torch.float16


def dtypes(plan: Plan, *, master: Master = Master.FP32) -> Dtypes:
    """What `plan` asks, of a job that keeps parameters so.

    Raises ConfigError for a precision that has no runtime or groups that disagree.
    """
    asked = {group.precision for stage in plan.stages for group in stage.groups}
    known = {
        Precision.FP64: (torch.float64, torch.float64),
        Precision.FP32: (torch.float32, torch.float32),
        Precision.TF32: (torch.float32, torch.float32),
        Precision.BF16: (torch.float32, torch.bfloat16),
        Precision.FP16: (torch.float32, torch.float16),
        **dict.fromkeys((entry for entry in Precision if recipe(entry)), (torch.float32, torch.bfloat16)),
    }
    problems = []
    if len(asked) > 1:
        problems.append(Problem(what="groups of different precision", where="plan.stages", fix="use one precision"))
    for precision in sorted(asked - known.keys()):
        fix = "use bf16, fp16, fp32, tf32, fp64, or eight or four bits"
        problems.append(Problem(what=f"{precision.value} has no runtime", where="plan.stages", fix=fix))
    if problems:
        raise ConfigError(problems)
    chosen = asked.pop()
    wide, compute = known[chosen]
    narrow = plan.gradients.precision is Precision.BF16 and wide is torch.float32
    reduce = torch.bfloat16 if narrow else wide
    return Dtypes(
        master=wide if master is Master.FP32 else torch.bfloat16,
        compute=compute,
        reduce=reduce,
        tf32=chosen is Precision.TF32,
        recipe=recipe(chosen),
        wire={Precision.FP8: Wire.E4M3, Precision.INT8: Wire.INT8}.get(plan.gradients.precision),
        compression=plan.gradients.compression,
    )
