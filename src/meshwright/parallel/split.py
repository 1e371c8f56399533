"""Split backward: the gradients of inputs now, those of matrices later (Zero Bubble, 2401.10241)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional

from meshwright.nn.experts import Experts
from meshwright.nn.grouped import GroupedProduct, grouped_product, multiply_grouped
from meshwright.nn.weights import Product, Weighted

_Passes = dict[int, list["PutOff"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOff:
    """The gradient of one matrix for one pass, yet to be formed: `above` (rows, outputs) transposed times `x` (rows,
    inputs), which goes on along `edge`: to the parameter, through whatever read it. Of stacked matrices it is one for
    each, and rows of matrix i are before `ends[i]`.
    """

    edge: GradientEdge
    x: Tensor
    above: Tensor
    ends: Tensor | None = None

    def formed(self) -> Tensor:
        """(outputs, inputs), or one of these for each of stacked matrices."""
        left = self.above.t()
        return left @ self.x if self.ends is None else multiply_grouped(left, self.x, self.ends)


class WeightGradients:
    """The gradients of one stage's matrices that its split backwards put off, by pass.

    `units` are its embedding, layers and head in order. Every other gradient (norms, biases, tables) comes with that
    of the input, as it costs next to nothing. A matrix keeps its input and its output's gradient, and nothing else of
    the pass lasts.
    """

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._units = tuple(units)
        self._passes: tuple[_Passes, ...] = tuple({} for _ in self._units)
        self._now: int | None = None
        self._splits = False
        for unit, passes in zip(self._units, self._passes, strict=True):
            product, grouped = self._products(passes)
            for module in unit.modules():
                if isinstance(module, Weighted):
                    module.product = product
                if isinstance(module, Experts):
                    module.grouped = grouped

    def before_forward(self, *, splits: bool) -> None:
        """The next pass is one whose backward is split, or one whose backward is whole."""
        self._splits = splits

    @contextmanager
    def putting_off(self, index: int) -> Iterator[None]:
        """Backward of pass `index`, whose forward was one that splits, puts off what `form` forms."""
        self._now, self._splits = index, True
        try:
            yield
        finally:
            self._now = None

    def form(self, index: int, *, done: Callable[[nn.Module], None]) -> None:
        """What pass `index` put off is added to the parameters' gradients; `done(unit)` after each unit, last first."""
        for unit, passes in zip(reversed(self._units), reversed(self._passes), strict=True):
            _form(passes.pop(index, []))
            done(unit)

    def _products(self, passes: _Passes) -> tuple[Product, GroupedProduct]:
        keep = self._keep(passes)

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if not self._puts_off(x, weight):
                return functional.linear(x, weight, bias)
            result: Tensor = _Product.apply(x, weight.detach(), bias, get_gradient_edge(weight), keep)
            return result

        def grouped(rows: Tensor, stacked: Tensor, ends: Tensor) -> Tensor:
            if not self._puts_off(rows, stacked):
                return grouped_product(rows, stacked, ends)
            result: Tensor = _Grouped.apply(rows, stacked.detach(), ends, get_gradient_edge(stacked), keep)
            return result

        return product, grouped

    def _puts_off(self, x: Tensor, weight: Tensor) -> bool:
        return self._splits and torch.is_grad_enabled() and x.requires_grad and weight.requires_grad

    def _keep(self, passes: _Passes) -> Callable[[PutOff], None]:
        def keep(put_off: PutOff) -> None:
            assert self._now is not None, "a forward that splits has a backward that does"
            passes.setdefault(self._now, []).append(put_off)

        return keep


class _Product(torch.autograd.Function):
    """x W^T + b (..., outputs), whose backward hands the gradient of W to `keep` unformed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        edge: GradientEdge,
        keep: Callable[[PutOff], None],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.edge, ctx.keep, ctx.has_bias = edge, keep, bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        above = grads[0].flatten(0, -2)
        ctx.keep(PutOff(edge=ctx.edge, x=x.detach().flatten(0, -2), above=above))
        return grads[0] @ weight, None, above.sum(0) if ctx.has_bias else None, None, None


class _Grouped(torch.autograd.Function):
    """Rows (n, inputs) times their matrices' transposes, whose backward hands the gradient of the stacked matrices to
    `keep` unformed."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, stacked: Tensor, ends: Tensor, edge: GradientEdge, keep: Callable[[PutOff], None]
    ) -> Tensor:
        ctx.save_for_backward(rows, stacked, ends)
        ctx.edge, ctx.keep = edge, keep
        return multiply_grouped(rows, stacked.transpose(-2, -1), ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, stacked, ends = ctx.saved_tensors
        above = grads[0].contiguous()
        ctx.keep(PutOff(edge=ctx.edge, x=rows.detach(), above=above, ends=ends))
        return multiply_grouped(above, stacked, ends), None, None, None, None


def _form(put_off: list[PutOff]) -> None:
    """One matrix at a time, so that one gradient lasts; those of one stacked parameter go back together."""
    runs: dict[Node, list[PutOff]] = {}
    for entry in put_off:
        runs.setdefault(entry.edge.node, []).append(entry)
    for entries in runs.values():
        gradients = [entry.formed() for entry in entries]
        torch.autograd.backward([entry.edge for entry in entries], gradients)
