"""Matrices as products of two thin ones (2103.03936), and the two that are nearest to a whole one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.nn.linear import Linear
from meshwright.nn.weights import Weighted
from meshwright.spec.model import MatrixRank


class FactoredLinear(Weighted):
    """y = (x V^T) U^T + b with U (outputs, rank) in `up` and V (rank, inputs) in `down`."""

    def __init__(self, inputs: int, outputs: int, *, rank: int, bias: bool) -> None:
        super().__init__()
        self.up = Linear(rank, outputs, bias=False)
        self.down = Linear(inputs, rank, bias=False)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.read(self.bias)
        return self.up.multiply(self.down(x), self.up.read(self.up.weight), bias)


def factor(layer: nn.Module, ranks: Sequence[MatrixRank]) -> None:
    """The matrices of `layer` that `ranks` names are factored, of the same shapes and biases and not filled."""
    for each in ranks:
        owner, _, name = each.name.rpartition(".")
        whole = layer.get_submodule(each.name)
        assert isinstance(whole, Linear), f"{each.name} is no matrix"
        outputs, inputs = whole.weight.shape
        made = FactoredLinear(inputs, outputs, rank=each.rank, bias=whole.bias is not None)
        setattr(layer.get_submodule(owner), name, made)


def balanced_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (m, rank) and V (rank, n) whose product is the nearest of that rank to `matrix` (m, n), in its precision.

    Both have the roots of the same singular values (spectral initialisation, 2105.01029). Worked out in fp64, with the
    largest entry of every column of U above zero, so that the pair is one and not any of its mirror images.
    """
    left, values, right = torch.linalg.svd(matrix.to(torch.float64), full_matrices=False)
    left, right = left[:, :rank], right[:rank]
    largest = left.gather(0, left.abs().argmax(dim=0, keepdim=True)).squeeze(0)
    root = torch.where(largest < 0.0, -1.0, 1.0) * values[:rank].sqrt()
    return (left * root).to(matrix.dtype), (root[:, None] * right).to(matrix.dtype)
