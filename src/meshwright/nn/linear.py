"""Linear and Table: the two leaf modules that hold matrices; neither initialises itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.nn.weights import Weighted

# x (..., inputs), W (outputs, inputs) and b to x W^T + b; a layout sets one that rounds its operands first.
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear(Weighted):
    """y = x W^T + b with W (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.product: Product = functional.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.read(self.weight), None if self.bias is None else self.read(self.bias))


class Table(Weighted):
    """Rows of a (rows, width) matrix by their indexes."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, indexes: Tensor) -> Tensor:
        return functional.embedding(indexes, self.read(self.weight))
