"""RoutedStage: a pipeline stage whose microbatches come from and go on to the stages of their paths (SkipPipe,
2502.19913)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from meshwright.parallel.stages.torch_compat import TableStage
from meshwright.schedule.paths import neighbours
from meshwright.schedule.program import BACKWARD, FORWARD, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The stage before and after one stage for each microbatch, and which it takes last, forward and backward."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    last_forward: int
    last_backward: int

    @classmethod
    def of(cls, program: Program, stage: int) -> Route:
        before, after = neighbours(program.paths, stages=program.stages, microbatches=program.microbatches)
        own = [program.microbatch[(program.stage == stage) & (program.work == work)] for work in (FORWARD, BACKWARD)]
        return cls(
            before=tuple(before[stage].tolist()),
            after=tuple(after[stage].tolist()),
            last_forward=int(own[0][-1]),
            last_backward=int(own[1][-1]),
        )


class RoutedStage(TableStage):
    """A stage of torch's runtime that knows for every microbatch where it comes from and where it goes.

    torch takes stages to be passed in turn by every microbatch, and the last of them to be the last backward.
    """

    def __init__(self, *arguments: Any, route: Route, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._route = route

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            _come_from(self.args_recv_info[fwd_chunk_id], self._route.before[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            _come_from(self.grad_recv_info[bwd_chunk_id], self._route.after[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.act_send_info = {place: [self._route.after[fwd_chunk_id]] for place in self.act_send_info}
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.grad_send_info = [self._route.before[bwd_chunk_id]]
        return super().get_bwd_send_ops(bwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        last = bwd_chunk_id == self._route.last_backward
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last)


def _come_from(places: Sequence[Any], stage: int) -> None:
    for place in places:
        place.source = stage
