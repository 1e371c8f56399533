"""Quantised training of one device, block by block and in the open, and of every rank of a layout in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.nn import Decoder, initialize
from meshwright.nn.decoder import DecoderLayer
from meshwright.nn.linear import Linear
from meshwright.nn.mixture import Experts
from meshwright.parallel import apply
from meshwright.parallel.precision import Dtypes, dtypes
from meshwright.parallel.quantized import recipe
from meshwright.spec.cluster import Precision
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import Master
from meshwright.spec.plan import Design, Plan
from tests.parallel import parity_cases
from tests.parallel.parity_cases import SEED, Outcome, RankOutcome, batch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
# The block of each operand, (rows, contracted): activations, weights, gradients.
BLOCKS = {
    Precision.FP8_BLOCK: ((1, 128), (128, 128), (1, 128)),
    Precision.MXFP8: ((1, 32), (1, 32), (1, 32)),
    Precision.NVFP4: ((1, 16), (16, 16), (1, 16)),
}


def nearest(x: Tensor, form: str) -> Tensor:
    """Every element at the nearest number of the format, the largest for what is larger."""
    x = x.clamp(-LARGEST[form], LARGEST[form])
    if form != "e2m1":
        return x.to(torch.float8_e4m3fn if form == "e4m3" else torch.float8_e5m2).to(x.dtype)
    sizes = torch.tensor(E2M1, dtype=x.dtype)
    gap = (x.abs().reshape(-1, 1) - sizes).abs()
    # Of two that are as near, the one with an even mantissa: an even place in the table.
    order = gap + torch.arange(len(E2M1)) % 2 * 1e-12
    return (sizes[order.argmin(dim=1)].view(x.shape) * x.sign()).to(x.dtype)


def rounded(x: Tensor, precision: Precision, operand: int) -> Tensor:
    """x (rows, contracted) by the recipe; operand 0 is an activation, 1 a weight, 2 a gradient."""
    whole = max(float(x.abs().max()), 1e-12)
    if precision is Precision.FP8:
        form = "e5m2" if operand == 2 else "e4m3"
        scale = torch.tensor(whole, dtype=x.dtype) / LARGEST[form]
        return nearest(x / scale, form) * scale
    if precision is Precision.FP8_ROW:
        return torch.stack([of_row(row) for row in x])
    high, wide = BLOCKS[precision][operand]
    form = "e2m1" if precision is Precision.NVFP4 else "e4m3"
    result = torch.empty_like(x)
    for top in range(0, x.shape[0], high):
        for left in range(0, x.shape[1], wide):
            part = x[top : top + high, left : left + wide]
            scale = part.abs().max().clamp(min=1e-12) / LARGEST[form]
            if precision is Precision.MXFP8:
                scale = torch.tensor(2.0 ** math.ceil(math.log2(scale)), dtype=x.dtype)
            if precision is Precision.NVFP4:
                outer = torch.tensor(whole, dtype=x.dtype) / (6.0 * 448.0)
                scale = nearest((scale / outer).clamp(min=2.0**-9), "e4m3") * outer
            result[top : top + high, left : left + wide] = nearest(part / scale, form) * scale
    return result


def of_row(row: Tensor) -> Tensor:
    """A row by fp8-row: its scale is the least power of two under which its largest element is a number of e4m3."""
    scale = 2.0 ** math.ceil(math.log2(max(float(row.abs().max()), 1e-12) / 448.0))
    return nearest(row / scale, "e4m3") * scale


class Product(torch.autograd.Function):
    """A linear whose three products have rounded operands, summed over in `parts` that are rounded apart: forward, and
    for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, precision: Precision, parts: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.precision, ctx.parts = precision, parts
        rows = in_parts(x.reshape(-1, x.shape[-1]), precision, 0, parts[0])
        return (rows @ in_parts(weight, precision, 1, parts[0]).T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        gradient, rows = grads[0].reshape(-1, weight.shape[0]), x.reshape(-1, x.shape[-1])
        left = in_parts(gradient, ctx.precision, 2, ctx.parts[1])
        into = left @ in_parts(weight.T.contiguous(), ctx.precision, 1, ctx.parts[1]).T
        turned = rounded(gradient.T.contiguous(), ctx.precision, 2)
        return into.view(x.shape), turned @ rounded(rows.T.contiguous(), ctx.precision, 0).T, None, None


def in_parts(x: Tensor, precision: Precision, operand: int, parts: int) -> Tensor:
    return torch.cat([rounded(part.contiguous(), precision, operand) for part in x.chunk(parts, dim=1)], dim=1)


def one_device(
    model: ModelSpec,
    precision: Precision,
    *,
    count: int,
    length: int,
    rate: float,
    parts: int = 1,
    together: int = 1,
) -> Outcome:
    """One sequence at a time, then one plain step down the gradient.

    Sums over features that `parts` tensor ranks would share are of as many parts, in linears alone. Experts multiply
    the rows of as many sequences `together` as data parallel ranks would send them.
    """
    decoder = Decoder(model).double()
    initialize(decoder, seed=SEED)

    def product_in(split: tuple[int, int]) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            apart = x.split(1) if x.dim() == 3 else (x,)  # sequences, or the rows of one expert
            result = torch.cat([Product.apply(each, weight, precision, split) for each in apart])
            return result if bias is None else result + bias

        return product

    for layer in decoder.modules():
        for name, module in layer.named_modules() if isinstance(layer, DecoderLayer) else ():
            if isinstance(module, (Linear, Experts)) and "router" not in name and "shared_gate" not in name:
                module.product = product_in((parts, 1) if name.endswith((".output", ".down")) else (1, parts))
    tokens, targets, _ = batch(count, length, model.vocab)

    turns = [slice(row, None, count // together) for row in range(count // together)]
    total = 0.0
    for rows in turns:
        logits = decoder(tokens[rows]).flatten(0, 1)
        share = functional.cross_entropy(logits, targets[rows].flatten()) * together / count
        share.backward()
        total += float(share.detach())
    named = dict(decoder.named_parameters())
    gradients = {name: p.grad.clone().numpy() for name, p in named.items() if p.grad is not None}
    norm = math.sqrt(sum(float((value**2).sum()) for value in gradients.values()))
    after = numpy.zeros(targets.shape)
    with torch.no_grad():
        for parameter in named.values():
            assert parameter.grad is not None
            parameter -= rate * parameter.grad
        for rows in turns:
            after[rows] = parity_cases.token_losses(decoder(tokens[rows]), targets[rows])
    parameters = {name: p.detach().numpy() for name, p in named.items()}
    return Outcome(loss=total, evaluation=after, norm=norm, gradients=gradients, parameters=parameters)


def one_rank(design: Design, precision: Precision) -> RankOutcome:
    """A step laid out in float64 with the rounding of `precision`."""

    def wide(plan: Plan, *, master: Master) -> Dtypes:
        return replace(dtypes(plan, master=master), recipe=recipe(precision))

    with mock.patch.object(apply, "dtypes", wide):
        return parity_cases.one_rank(design, parity_cases.Documents.ONE)
