"""The order in which a pipeline rank receives and runs its passes: the real executor, on stages that do nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.parallel.split import WeightGradients
from meshwright.run.dry.marks import PassNames
from meshwright.run.dry.torch_compat import lonely_world
from meshwright.spec.plan import Plan
from meshwright.train.observe.collectives import NAMESPACES, operation_of
from meshwright.train.torch_compat import TorchDispatchMode

RECEIVE = "receive"
_HIDDEN_DIMS = 3


def order_of(plan: Plan, *, rank: int) -> tuple[str, ...]:
    """RECEIVE for every tensor that pipeline rank `rank` makes room for, and the mark of every pass when it ends."""
    slices = plan.schedule.slices
    small = replace(plan, microbatch=1, sequence_length=plan.context * slices)
    log = _Log()
    with lonely_world(rank=rank, world_size=plan.pipeline):
        group = dist.group.WORLD
        assert group is not None
        parts = [_Nothing() for _ in plan.stages_of(rank)]
        synchronizers = [BucketedGradients((), groups=()) for _ in parts]
        for synchronizer in synchronizers:
            log.names.watch(synchronizer)
        executor = PipelineExecutor(
            parts=parts,
            synchronizers=synchronizers,
            weights=[WeightGradients((part,)) for part in parts],
            plan=small,
            group=group,
            device=torch.device("cpu"),
            hidden=torch.empty(1, 1, 1, device="meta"),
            loss_function=lambda logits, _targets: logits.sum(),
            recorder=log,
        )
        tokens = torch.zeros((plan.schedule.microbatches, slices), dtype=torch.int64)
        with log.receives:
            executor.step(tokens, tokens)
    return tuple(log.order)


class _Log:
    """A recorder that keeps the order of passes; `receives` adds that of receives."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.names = PassNames()
        self.receives = _Receives(self.order)

    def record(self, name: str, _start: float, _seconds: float, *, stage: int = -1, microbatch: int = -1) -> None:
        self.order.append(self.names.name(name, stage=stage, microbatch=microbatch))


class _Receives(TorchDispatchMode):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES and operation_of(func.overloadpacket.__name__) == "recv":
            # Before their first step stages also send each other single numbers.
            self._order += [RECEIVE for tensor in args[0] if tensor.dim() == _HIDDEN_DIMS]
        return result


class _Nothing(nn.Module):
    """A stage that gives what it was given, with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, *, documents: Tensor | None = None, ahead: Tensor | None = None) -> Tensor:
        del documents, ahead
        return x.reshape(1, 1, 1) * self.weight
