"""The orders in which pipeline ranks receive and run their passes: the actions of the real executor, on idle stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.pipeline import PipelineExecutor, reach
from meshwright.parallel.split import WeightGradients
from meshwright.parallel.stages.torch_compat import Reach
from meshwright.run.dry.marks import PassNames
from meshwright.run.dry.torch_compat import lonely_world
from meshwright.schedule import Work, planned
from meshwright.spec.plan import Plan
from meshwright.spec.report import LineName
from meshwright.spec.span import Silent

RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Action:
    """What a pipeline rank does next: `work` is F, B, I, W, RECV_F, RECV_B, SEND_F, SEND_B, REDUCE_GRAD, UNSHARD or
    RESHARD; `number` is that of the microbatch, or of its slice among those of all, and -1 where it is for all."""

    work: str
    stage: int
    number: int


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
        return tuple(_marks(self.plan, actions_of(self._runtime, rank)))

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


def _marks(plan: Plan, actions: Iterable[Action]) -> Iterator[str]:
    """What a rank marks where it performs `actions`."""
    slices = plan.schedule.slices
    names, left = PassNames(slices=slices), [planned.passes(plan.schedule, stage) for stage in range(len(plan.stages))]
    still_ones = {stage for stage in range(len(plan.stages)) if reach(plan, stage) is Reach.STILL}
    for action in actions:
        stage, index, work = action.stage, action.number // slices, action.work
        still = stage in still_ones
        if work == "RECV_F" or (work == "RECV_B" and not still):
            yield RECEIVE
        elif work == Work.FORWARD:
            yield names.name(LineName.FORWARD, stage=stage, microbatch=index)
        elif work == "REDUCE_GRAD":
            yield names.name(LineName.GRADIENTS, stage=stage, microbatch=-1)
        elif work in (Work.BACKWARD, Work.INPUT, Work.WEIGHT) and not still:
            left[stage] -= work != Work.INPUT
            names.tell(Work(work), last=not left[stage])
            yield names.name(LineName.BACKWARD, stage=stage, microbatch=index)
