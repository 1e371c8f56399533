"""Staging: a copy of a rank's state in the host's memory, from which a checkpoint is written beside training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.parallel.clip import local_part


class Staging:
    """One copy at most. Its memory is kept for the next: to get it anew takes longer than to copy."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors` as they are now, in the memory of the copy before, which is gone."""
        before, self._kept = self._kept, {}
        with torch.no_grad():
            for name, x in tensors.items():
                kept = before.pop(name, None)
                if kept is not None and _alike(kept, x):
                    local_part(kept).copy_(local_part(x))
                else:
                    del kept
                    kept = x.to("cpu", copy=True)
                self._kept[name] = kept
        return dict(self._kept)


def _alike(kept: Tensor, x: Tensor) -> bool:
    """The same part of a tensor of the same shape and type, and where it is in the same way part of a whole."""
    if isinstance(kept, DTensor) and isinstance(x, DTensor):
        if (kept.device_mesh, kept.placements) != (x.device_mesh, x.placements):
            return False
    elif isinstance(kept, DTensor) or isinstance(x, DTensor):
        return False
    return (kept.shape, kept.dtype) == (x.shape, x.dtype)
