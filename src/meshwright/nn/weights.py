"""Weighted: a module that reads and multiplies its parameters through two doors, so that a layout can cast or localise
them, and put off their gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

Reader = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Weighted(nn.Module):
    """A module whose forward reads every parameter of its own through `read`.

    `reader` is None on one device. A layout sets it where the parameter that is kept differs from the one that
    multiplies: kept in fp32 and used in bf16, or kept as a distributed tensor and used as its local part. `product`
    is None too, and x W^T + b by `functional.linear`: a layout sets one whose gradient of W can come later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reader: Reader | None = None
        self.product: Product | None = None

    def read(self, weight: Tensor) -> Tensor:
        return weight if self.reader is None else self.reader(weight)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b (..., outputs) of a matrix (outputs, inputs) that was read."""
        if self.product is None:
            return functional.linear(x, weight, bias)
        return self.product(x, weight, bias)
