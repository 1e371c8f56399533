"""Of every bucket the largest elements with their places, gathered from all ranks; the others are left for later."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.gathering import Gathering
from meshwright.spec.compression import kept

_PLACE = torch.int32


class TopKReduction:
    """Top-k with error feedback (1809.07599): `share` of what a rank owes goes to every rank, who add it up in the
    order of the ranks. An element travels as its number and four bytes of place."""

    def __init__(self, like: Tensor, *, group: dist.ProcessGroup, share: float) -> None:
        self._gathering, self._kept = Gathering(group), kept(like.numel(), share=share)
        self._left = torch.zeros_like(like)

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self._left,)

    def start(self, flat: Tensor, *, step: int) -> None:
        self._left.add_(flat)
        places = self._left.abs().topk(self._kept, sorted=False).indices
        values = self._left[places]
        self._left[places] = 0.0
        self._gathering.start(torch.cat((values.view(torch.uint8), places.to(_PLACE).view(torch.uint8))))

    def turn(self) -> None:
        """Nothing: what was sent is all."""

    def finish(self, flat: Tensor) -> None:
        flat.zero_()
        split = self._kept * flat.element_size()
        for packed in self._gathering.finish():
            # Places of one rank differ, so that its additions commute; ranks come in one order everywhere.
            places = packed[split:].clone().view(_PLACE).long()
            flat.index_add_(0, places, packed[:split].clone().view(flat.dtype))
