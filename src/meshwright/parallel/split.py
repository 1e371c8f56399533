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

from meshwright.nn.weights import Product, Weighted

_Passes = dict[int, list["PutOff"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOff:
    """The gradient of one matrix for one pass, yet to be formed: `above` (rows, outputs) transposed times `x` (rows,
    inputs), which goes on along `edge`: to the parameter, through whatever read it.
    """

    edge: GradientEdge
    x: Tensor
    above: Tensor


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
            product = self._product(passes)
            for module in unit.modules():
                if isinstance(module, Weighted):
                    module.product = product

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

    def _product(self, passes: _Passes) -> Product:
        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if not (self._splits and torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
                return functional.linear(x, weight, bias)
            result: Tensor = _Product.apply(x, weight.detach(), bias, get_gradient_edge(weight), self._keep(passes))
            return result

        return product

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


def _form(put_off: list[PutOff]) -> None:
    """One matrix at a time, so that one gradient lasts; those of one stacked parameter go back together."""
    runs: dict[Node, list[PutOff]] = {}
    for entry in put_off:
        runs.setdefault(entry.edge.node, []).append(entry)
    for entries in runs.values():
        gradients = [entry.above.t() @ entry.x for entry in entries]
        torch.autograd.backward([entry.edge for entry in entries], gradients)
