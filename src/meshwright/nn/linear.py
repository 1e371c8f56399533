"""Linear and Table: the two leaf modules that hold matrices; neither initialises itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.nn.weights import Weighted


class Linear(Weighted):
    """y = x W^T + b with W (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.read(self.weight), None if self.bias is None else self.read(self.bias))


class Table(Weighted):
    """Rows of a (rows, width) matrix by their indexes."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, indexes: Tensor) -> Tensor:
        return functional.embedding(indexes, self.read(self.weight))
