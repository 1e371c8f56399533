"""The orders in which pipeline ranks receive and run their passes: the actions of the real executor, on idle stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.parallel.split import WeightGradients
from meshwright.run.dry.names import Action, marked
from meshwright.run.dry.torch_compat import lonely_world
from meshwright.spec.plan import Plan
from meshwright.spec.span import Silent


def actions_of(runtime: Any, rank: int) -> Iterator[Action]:
    """What a rank does in a step of torch's pipeline runtime, in that order."""
    for entry in runtime.pipeline_order_with_comms[rank]:
        number = -1 if entry.microbatch_index is None else entry.microbatch_index
        yield Action(entry.computation_type.value, entry.stage_index, number)


@dataclass(kw_only=True)
class Orders:
    """What each pipeline rank of `plan` does in a step."""

    plan: Plan

    def of(self, rank: int) -> tuple[str, ...]:
        """RECEIVE for every tensor that pipeline rank `rank` makes room for, and the mark of every pass at its end."""
        return tuple(marked(self.plan, actions_of(self._runtime, rank)))

    @cached_property
    def _runtime(self) -> Any:
        with lonely_world(rank=0, world_size=self.plan.pipeline):
            return _idle(self.plan).runtime(self.plan.schedule.microbatches, train=True)


def _idle(plan: Plan) -> PipelineExecutor:
    """The executor of the first pipeline rank on stages that do nothing."""
    group = dist.group.WORLD
    assert group is not None
    parts = [nn.Identity() for _ in plan.stages_of(0)]
    return PipelineExecutor(
        parts=parts,
        synchronizers=[BucketedGradients((), groups=()) for _ in parts],
        weights=[WeightGradients((part,)) for part in parts],
        plan=replace(plan, microbatch=1, sequence_length=plan.context * plan.schedule.slices),
        group=group,
        device=torch.device("cpu"),
        hidden=torch.empty(1, 1, 1, device="meta"),
        loss_function=lambda logits, _targets: logits.sum(),
        recorder=Silent(),
    )
