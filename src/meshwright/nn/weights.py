"""Weighted: a module that reads and multiplies its parameters through two doors, so that a layout can cast or localise
them, and put off their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn
from torch.nn import functional

Reader = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Spread = Callable[[Tensor, Sequence[nn.Module]], Iterator[Tensor]]


class Weighted(nn.Module):
    """A module whose forward reads every parameter of its own through `read`.

    `reader` is None on one device. A layout sets it where the parameter that is kept differs from the one that
    multiplies: kept in fp32 and used in bf16, or kept as a distributed tensor and used as its local part. `product`
    is None too, and x W^T + b by `functional.linear`: a layout sets one whose gradient of W can come later.
    `spread`, None on one device as well, makes together what several modules make of one input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reader: Reader | None = None
        self.product: Product | None = None
        self.spread: Spread | None = None

    def read(self, weight: Tensor) -> Tensor:
        return weight if self.reader is None else self.reader(weight)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b (..., outputs) of a matrix (outputs, inputs) that was read."""
        if self.product is None:
            return functional.linear(x, weight, bias)
        return self.product(x, weight, bias)

    def project(self, x: Tensor, modules: Sequence[nn.Module]) -> Iterator[Tensor]:
        """What each of `modules`, which hold a matrix each, makes of x, one after the other as they are asked for."""
        return (module(x) for module in modules) if self.spread is None else self.spread(x, modules)
