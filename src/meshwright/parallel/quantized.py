"""Products of layers whose operands are rounded to eight or four bits first, as recipes for them say.

On processors this is arithmetic, not speed: operands are rounded and scaled back, and multiplied in fp32, which is
what units of that precision compute, but for the order of their sums. Accelerators multiply the rounded numbers
themselves (`scaled`). Weights, activations and gradients stay in the precision that multiplies otherwise, and what is
rounded is made anew for each of a linear's three products. Embedding, head, norms, routers, gates and scores of
attention are left as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from meshwright.nn.linear import Linear
from meshwright.nn.mixture import Experts
from meshwright.spec.cluster import Precision

LEAST = 1e-12  # the least largest magnitude that a scale is made of


class Format(StrEnum):
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M1 = "e2m1"

    @property
    def largest(self) -> float:
        return {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}[self.value]


class Scale(StrEnum):
    """Scales are fp32; powers of two rounded up (e8m0, OCP MX); or e4m3 of blocks under fp32 of the tensor (nvfp4)."""

    FP32 = "fp32"
    POWER = "power"
    TWO_LEVEL = "two-level"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """How an operand (rows, contracted) is rounded: one scale for every `block` of it, or for the tensor (None).

    A block without a width is as wide as the operand.
    """

    form: Format
    block: tuple[int, int | None] | None
    scale: Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the operands of a linear's products are rounded, each with the dim that a product sums over last.

    fp8 is a scale a tensor, gradients in e5m2; fp8-row a power of two for each row, all in e4m3, as torchao's row-wise
    recipe; fp8-block DeepSeek-V3's tiles (2412.19437); mxfp8 blocks of 32 with
    scales of OCP MX, all in e4m3; nvfp4 blocks of 16 (2509.25149), rounded to nearest and not turned by Hadamard.
    """

    activation: Operand
    weight: Operand
    gradient: Operand


def recipe(precision: Precision) -> Recipe | None:
    """The recipe of `precision`; None where operands are multiplied as they are."""

    def one(block: tuple[int, int | None] | None, scale: Scale, form: Format = Format.E4M3) -> Operand:
        return Operand(form=form, block=block, scale=scale)

    whole, tile, micro = one(None, Scale.FP32), one((1, 128), Scale.FP32), one((1, 32), Scale.POWER)
    row = one((1, None), Scale.POWER)
    small = one((1, 16), Scale.TWO_LEVEL, Format.E2M1)
    return {
        Precision.FP8: Recipe(activation=whole, weight=whole, gradient=one(None, Scale.FP32, Format.E5M2)),
        Precision.FP8_ROW: Recipe(activation=row, weight=row, gradient=row),
        Precision.FP8_BLOCK: Recipe(activation=tile, weight=one((128, 128), Scale.FP32), gradient=tile),
        Precision.MXFP8: Recipe(activation=micro, weight=micro, gradient=micro),
        Precision.NVFP4: Recipe(activation=small, weight=one((16, 16), Scale.TWO_LEVEL, Format.E2M1), gradient=small),
    }.get(precision)


class Multiply(Protocol):
    """left right^T of two matrices (rows, contracted) rounded as their operands say, in `dtype`.

    Collective over `group`, where it divides them.
    """

    def __call__(
        self, pairs: list[tuple[Tensor, Operand]], group: dist.ProcessGroup | None, *, dtype: torch.dtype
    ) -> Tensor: ...


def emulated(pairs: list[tuple[Tensor, Operand]], group: dist.ProcessGroup | None, *, dtype: torch.dtype) -> Tensor:
    """A Multiply of what is rounded and scaled back, in fp32 or wider."""
    left, right = quantized(pairs, group)
    return (left @ right.T).to(dtype)


def quantize_products(
    layer: nn.Module,
    how: Recipe,
    *,
    group: dist.ProcessGroup | None,
    slices: dist.ProcessGroup | None,
    multiply: Multiply = emulated,
) -> None:
    """The linears and experts of `layer` multiply as `how` says, by `multiply`.

    Where `group` divides matrices of linears, and `slices` those of experts, a scale of a tensor is that of the whole
    one: magnitudes are compared over them. Blocks and rows are those of what a rank has, as its kernels would scale
    them; they are those of the whole where the parts are whole ones. An expert multiplies the rows of all ranks that
    send it some at once.
    """

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, *, over: dist.ProcessGroup | None = group) -> Tensor:
        result: Tensor = _Product.apply(x, weight, how, over, multiply)
        return result if bias is None else result + bias

    for name, module in layer.named_modules():
        if isinstance(module, Experts):
            module.product, module.grouped = partial(product, over=slices), None
        elif isinstance(module, Linear) and not name.endswith((".router", ".shared_gate")):
            module.product = product


class _Product(torch.autograd.Function):
    """x W^T for x (..., k) and W (n, k), with rounded operands in it and in both products of its backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, how: Recipe, group: dist.ProcessGroup | None, multiply: Multiply
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.group, ctx.multiply = how, group, multiply
        pairs = [(x.reshape(-1, x.shape[-1]), how.activation), (weight, how.weight)]
        return multiply(pairs, group, dtype=x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        how: Recipe = ctx.how
        gradient, rows = grads[0].reshape(-1, weight.shape[0]), x.reshape(-1, x.shape[-1])
        into, onto = None, None
        if ctx.needs_input_grad[0]:
            pairs = [(gradient, how.gradient), (weight.T, how.weight)]
            into = ctx.multiply(pairs, ctx.group, dtype=x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            pairs = [(gradient.T, how.gradient), (rows.T, how.activation)]
            onto = ctx.multiply(pairs, ctx.group, dtype=weight.dtype)
        return into, onto, None, None, None


def quantized(pairs: list[tuple[Tensor, Operand]], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every matrix rounded as its operand says and scaled back, in fp32 or wider. Collective over `group`."""
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x, _ in pairs]
    found = largest_of(wide, [how for _, how in pairs], group)
    return [rounded(x, how, largest=value) for x, (_, how), value in zip(wide, pairs, found, strict=True)]


def largest_of(matrices: list[Tensor], operands: list[Operand], group: dist.ProcessGroup | None) -> list[Tensor | None]:
    """The largest magnitude of every whole matrix whose operand needs it. Collective over `group`."""
    largest = [magnitude(x) if _needs_whole(how) else None for x, how in zip(matrices, operands, strict=True)]
    shared = [value for value in largest if value is not None]
    if group is not None and shared:
        together = torch.stack(shared)
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
        found = iter(together.unbind(0))
        largest = [None if value is None else next(found) for value in largest]
    return largest


def rounded(x: Tensor, how: Operand, *, largest: Tensor | None) -> Tensor:
    """x (rows, columns) in fp32 or wider, rounded to the operand's format; `largest` magnitude of the whole tensor."""
    if how.block is None:
        assert largest is not None
        return _to_format(x, largest.clamp(min=LEAST) / how.form.largest, how.form)
    rows, columns = x.shape
    high, wide = how.block[0], how.block[1] or max(columns, 1)
    padded = functional.pad(x, (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scale = block_scale(blocks.abs().amax(dim=(1, 3), keepdim=True), how, largest)
    return _to_format(blocks, scale, how.form).view(padded.shape)[:rows, :columns]


def block_scale(largest: Tensor, how: Operand, whole: Tensor | None) -> Tensor:
    """What numbers of blocks are multiplied by, from the largest magnitude of each and of the whole."""
    scale = largest.clamp(min=LEAST) / how.form.largest
    if how.scale is Scale.POWER:
        return torch.exp2(torch.ceil(torch.log2(scale)).clamp(-127.0, 127.0))
    if how.scale is Scale.FP32:
        return scale
    assert whole is not None
    outer = whole.clamp(min=LEAST) / (how.form.largest * Format.E4M3.largest)
    # A block much smaller than the largest has the least scale there is.
    inner = (scale / outer).clamp(2.0**-9, Format.E4M3.largest)
    return inner.to(torch.float8_e4m3fn).to(scale.dtype) * outer


def _to_format(x: Tensor, scale: Tensor, form: Format) -> Tensor:
    """x / scale rounded to nearest, and times scale again."""
    inside = (x / scale).clamp(-form.largest, form.largest)
    return _ROUND[form](inside) * scale


def _as_e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, halfway to the even mantissa; x is at most 6."""
    size = x.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0)).to(x.dtype)
    return torch.round(x / step) * step


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


_ROUND: Mapping[Format, Callable[[Tensor], Tensor]] = MappingProxyType(
    {Format.E4M3: _cast(torch.float8_e4m3fn), Format.E5M2: _cast(torch.float8_e5m2), Format.E2M1: _as_e2m1}
)


def magnitude(x: Tensor, *, dim: int | None = None) -> Tensor:
    """The largest magnitude of x, in fp32 or wider: of all, or along `dim`, which stays with size 1."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if not x.numel():
        return x.new_zeros(() if dim is None else (*x.shape[:dim], 1, *x.shape[dim + 1 :]), dtype=dtype)
    return torch.linalg.vector_norm(x, math.inf, dim=dim, keepdim=dim is not None, dtype=dtype)


def _needs_whole(how: Operand) -> bool:
    return how.block is None or how.scale is Scale.TWO_LEVEL
