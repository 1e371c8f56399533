"""Root-mean-square norm (1910.07467) and layer norm (1607.06450), in fp32 inside whatever goes in."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.nn.weights import Weighted
from meshwright.spec.model import Norm, NormKind


class RootMeanSquareNorm(Weighted):
    """x / rms(x) over the last dim, times a scale when `scaled`."""

    def __init__(self, width: int, *, eps: float, scaled: bool = True) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.read(self.weight)
        return functional.rms_norm(x, (x.shape[-1],), weight, self.eps)


class LayerNorm(Weighted):
    """(x - mean) / deviation over the last dim, times a scale, plus a bias."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), self.read(self.weight), self.read(self.bias), self.eps)


def build_norm(spec: Norm | None) -> Weighted | None:
    """The module that `spec` says; None when there is none."""
    if spec is None:
        return None
    if spec.kind is NormKind.LAYER:
        return LayerNorm(spec.width, eps=spec.eps)
    return RootMeanSquareNorm(spec.width, eps=spec.eps)
