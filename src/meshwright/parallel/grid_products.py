"""Matrix products over a square or a cube of ranks, as autograd functions.

Of y = x W^T with x (M, K) and W (N, K), `e` bytes a number and q ranks a side, and bytes of whole tensors:

- square (SUMMA, Optimus, 2104.05343): rank (i, j) holds block (i, j) of x, of W^T and of y. Forward broadcasts
  e M K / q along the rows and e K N / q along the columns. Backward gives dx = dy W, which broadcasts e K N / q and
  reduces e M K / q, and dW = dy^T x, which broadcasts e M K / q and reduces e K N / q: as many bytes as forward moves,
  three times in all, and log2(q) times that on the links of a tree. What several products read is broadcast once.
- cube (2105.14450): every tensor lies divided over all q^3 ranks. Forward gathers e M K / q^2 and e K N / q^2 and
  reduce-scatters e M N / q^2; backward gathers dy and reduce-scatters dx and dW, the same bytes again, of which each
  rank sends (q - 1) / q.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.parallel.torch_compat import all_gather_single, reduce_scatter_single


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n * rows, ...) from each rank's (rows, ...), in rank order."""
    whole = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather_single(whole, x.contiguous(), group=group)
    return whole


def scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(rows / n, ...): this rank's share of the sum over ranks of (rows, ...); on gloo as `scatter_sequence` does."""
    parts = x.unflatten(0, (group.size(), -1)).contiguous()
    if x.device.type == "cpu":
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received.sum(dim=0)
    result = torch.empty_like(parts[0])
    reduce_scatter_single(result, parts, group=group)
    return result


class GatherRows(torch.autograd.Function):
    """All rows from each rank's; gradients are summed and each rank keeps its rows'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return scatter_rows(grads[0], ctx.group), None


class ScatterRows(torch.autograd.Function):
    """This rank's rows of the ranks' summed x; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_rows(grads[0], ctx.group), None


class SquareProducts(torch.autograd.Function):
    """x W^T (..., N) of x (..., K) by each W (N, K), where rank (i, j) of a square holds x_ij and the rows j and
    columns i of every W.

    `row` is the group of ranks of one i, `column` of one j. What several products read is broadcast once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, row: dist.ProcessGroup, column: dist.ProcessGroup, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.row, ctx.column = row, column
        return _sums_of_steps(x, [weight.t() for weight in weights], row=row, column=column)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        given = [grad.contiguous() for grad in grads]
        turned = [weight.t() for weight in weights]
        to_x = _reduced_steps(given, turned, row=ctx.row, column=ctx.column)
        to_weights = [torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in weights]
        for step in range(ctx.row.size()):
            block = broadcast_from(x, step, group=ctx.row).flatten(0, -2)
            for result, grad in zip(to_weights, given, strict=True):
                _reduce_to(result, _turned(grad) @ block, step, group=ctx.column)
        return to_x, None, None, *to_weights


class SquareTurned(torch.autograd.Function):
    """x T^T (..., N) of x (..., K) by a table T (N, K); rank (i, j) of a square holds block (i, j) of x and of T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, row: dist.ProcessGroup, column: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, table)
        ctx.row, ctx.column = row, column
        return _reduced_steps([x], [table], row=row, column=column)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, table = ctx.saved_tensors
        grad = grads[0].contiguous()
        (to_x,) = _sums_of_steps(grad, [table], row=ctx.row, column=ctx.column)
        to_table = torch.empty_like(table, memory_format=torch.contiguous_format)
        for step in range(ctx.row.size()):
            block = broadcast_from(grad, step, group=ctx.row)
            _reduce_to(to_table, _turned(block) @ x.flatten(0, -2), step, group=ctx.column)
        return to_x, to_table, None, None


class SquareRows(torch.autograd.Function):
    """Rows of a table T (N, K) by their indexes (...), of which every rank of row i knows those of its tokens: (..., K)
    divided as T's columns are."""

    @staticmethod
    def forward(ctx: Any, indexes: Tensor, table: Tensor, column: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(indexes)
        ctx.column, ctx.shape = column, table.shape
        found = table.new_zeros((*indexes.shape, table.shape[1]))
        for step in range(column.size()):
            block = broadcast_from(table, step, group=column)
            own, here = _among(indexes, step, rows=len(table))
            found += functional.embedding(own, block) * here[..., None]
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (indexes,) = ctx.saved_tensors
        result = grads[0].new_empty(ctx.shape)
        for step in range(ctx.column.size()):
            own, here = _among(indexes, step, rows=ctx.shape[0])
            partial = grads[0].new_zeros(ctx.shape)
            partial.index_add_(0, own.flatten(), (grads[0] * here[..., None]).flatten(0, -2))
            _reduce_to(result, partial, step, group=ctx.column)
        return None, result, None


def broadcast_from(x: Tensor, source: int, *, group: dist.ProcessGroup) -> Tensor:
    """The x of rank `source` of the group."""
    block = x.contiguous() if group.rank() == source else torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.broadcast(block, group_src=source, group=group)
    return block


def _sums_of_steps(
    a: Tensor, factors: Sequence[Tensor], *, row: dist.ProcessGroup, column: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Block (i, j) of A B for each B of `factors`, from those of A (..., K) and B (K, N): step l broadcasts a_il along
    rows and b_lj along columns."""
    totals = tuple(a.new_zeros((*a.shape[:-1], b.shape[1])) for b in factors)
    for step in range(row.size()):
        block = broadcast_from(a, step, group=row).flatten(0, -2)
        for total, b in zip(totals, factors, strict=True):
            _add_product(total.flatten(0, -2), block, broadcast_from(b, step, group=column))
    return totals


def _reduced_steps(
    summands: Sequence[Tensor], factors: Sequence[Tensor], *, row: dist.ProcessGroup, column: dist.ProcessGroup
) -> Tensor:
    """Block (i, j) of the sum of A B^T over pairs of `summands` and `factors`, from those of A (..., K) and B (N, K):
    step l broadcasts b_lj along columns and sums along rows what is block (i, l)."""
    result = summands[0].new_empty((*summands[0].shape[:-1], factors[0].shape[0]))
    for step in range(row.size()):
        partial = result.new_zeros(result.shape)
        for a, b in zip(summands, factors, strict=True):
            _add_product(partial.flatten(0, -2), a.flatten(0, -2), broadcast_from(b, step, group=column).t())
        _reduce_to(result, partial, step, group=row)
    return result


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total` has a b added, in the operator that counters of FLOPs know."""
    torch.addmm(total, a, b, out=total)


def _turned(x: Tensor) -> Tensor:
    """(features, rows) of (..., features)."""
    return x.flatten(0, -2).t()


def _reduce_to(result: Tensor, partial: Tensor, target: int, *, group: dist.ProcessGroup) -> None:
    """`result` of rank `target` of the group is the sum of the ranks' `partial`, which is spent."""
    dist.reduce(partial, group_dst=target, group=group)
    if group.rank() == target:
        result.copy_(partial)


def _among(indexes: Tensor, block: int, *, rows: int) -> tuple[Tensor, Tensor]:
    """Indexes within block `block` of so many rows, and which of them are there."""
    own = indexes - block * rows
    return own.clamp(0, rows - 1), (own >= 0) & (own < rows)
