"""Weighted: a module that reads its parameters through one door, so that a layout can cast or localise them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

Reader = Callable[[Tensor], Tensor]


class Weighted(nn.Module):
    """A module whose forward reads every parameter of its own through `read`.

    `reader` is None on one device. A layout sets it where the parameter that is kept differs from the one that
    multiplies: kept in fp32 and used in bf16, or kept as a distributed tensor and used as its local part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reader: Reader | None = None

    def read(self, weight: Tensor) -> Tensor:
        return weight if self.reader is None else self.reader(weight)
