"""Flat: this rank's parts of some parameters as one tensor, and one tensor as parts laid out as theirs are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.parallel.clip import local_part
from meshwright.parallel.torch_compat import with_local


class Flat:
    """Parameters by name, in one order on every learner. What is made flat has no less than fp32."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = tuple(named)
        self._sizes = [local_part(x.detach()).numel() for _, x in self._named]
        self.numel = sum(self._sizes)
        wide = [x.dtype for _, x in self._named if x.dtype is torch.float64]
        self.dtype = torch.float64 if wide else torch.float32

    def zeros(self) -> Tensor:
        """(numel,) of zeros, on the device of the parameters."""
        device = local_part(self._named[0][1].detach()).device if self._named else None
        return torch.zeros(self.numel, dtype=self.dtype, device=device)

    def read(self) -> Tensor:
        """(numel,): a copy of what the parameters are."""
        flat = self.zeros()
        for (_, x), piece in zip(self._named, flat.split(self._sizes), strict=True):
            held = local_part(x.detach())
            piece.view_as(held).copy_(held)
        return flat

    def write(self, flat: Tensor) -> None:
        """The parameters are what `flat` (numel,) holds."""
        for (_, x), piece in zip(self._named, flat.split(self._sizes), strict=True):
            held = local_part(x.detach())
            held.copy_(piece.view_as(held))

    def square(self, flat: Tensor, *, of: Collection[Tensor]) -> Tensor:
        """The sum of squares of what `flat` (numel,) holds of the parameters `of`."""
        pieces = zip(self._named, flat.split(self._sizes), strict=True)
        norms = [torch.linalg.vector_norm(piece) for (_, x), piece in pieces if x in of]
        return torch.stack(norms).square().sum() if norms else flat.new_zeros(())

    def views(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """`flat` (numel,) by the names of the parameters and laid out as they are; the same memory."""
        found = []
        for (name, x), piece in zip(self._named, flat.split(self._sizes), strict=True):
            found.append((name, _laid_like(x.detach(), piece.view_as(local_part(x.detach())))))
        return found


def _laid_like(x: Tensor, local: Tensor) -> Tensor:
    """`local`, which may be wider, in the layout of x."""
    if not isinstance(x, DTensor):
        return local
    if local.dtype is x.dtype:
        return with_local(x, local)
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
