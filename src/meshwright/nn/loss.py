"""Loss of every token from logits, with one copy of the logits in memory from forward to backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.spec.targets import MASKED

# Of logits that are read at once: on a processor as many as its caches hold.
CPU_CHUNK_ELEMENTS, ACCELERATOR_CHUNK_ELEMENTS = 2**20, 2**26


class Vocabulary(Protocol):
    """Where the columns of the logits stand in the whole vocabulary, and how ranks that share it agree.

    `maximum` and `total` reduce in place over those ranks.
    """

    offset: int

    def maximum(self, x: Tensor) -> None: ...

    def total(self, x: Tensor) -> None: ...


class WholeVocabulary:
    """All columns are here."""

    offset = 0

    def maximum(self, x: Tensor) -> None:
        return None

    def total(self, x: Tensor) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPasses:
    """The passes over rows of logits (n, columns) that a compiler can make one kernel each.

    `sums(rows, top)` gives the sum of each row's exponentials over its `top` (n,), in the precision of `top`.
    `gradient(rows, partition, weight)` leaves each row's softmax, by its log-`partition` (n,), times `weight` (n,).
    """

    sums: Callable[[Tensor, Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], None]

    def compiled(self) -> LossPasses:
        return LossPasses(sums=torch.compile(self.sums), gradient=torch.compile(self.gradient))


def _sums(rows: Tensor, top: Tensor) -> Tensor:
    return torch.sub(rows, top[:, None]).exp_().sum(dim=-1)


def _gradient(rows: Tensor, partition: Tensor, weight: Tensor) -> None:
    shifted = rows if rows.dtype is partition.dtype else None
    torch.mul(torch.sub(rows, partition[:, None], out=shifted).exp_(), weight[:, None], out=rows)


AS_WRITTEN = LossPasses(sums=_sums, gradient=_gradient)


def token_losses(
    logits: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    vocabulary: Vocabulary | None = None,
    passes: LossPasses = AS_WRITTEN,
) -> Tensor:
    """Cross entropy of each token plus `z_loss` times its squared log-partition (PaLM, 2204.02311), shape of targets.

    logits (..., columns) in any precision, targets (...) int64 numbered over the whole vocabulary. Where a target is
    MASKED the loss and its gradient are 0, unless its logits are not finite. The result is fp32 (fp64 for fp64 logits),
    formed without an fp32 copy of the logits. Backward writes the gradient over the logits, which nothing else may
    read; a second backward raises.
    """
    result: Tensor = _TokenLosses.apply(logits, targets, z_loss, vocabulary or WholeVocabulary(), passes)
    return result


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, z_loss: float, vocabulary: Vocabulary, passes: LossPasses
    ) -> Tensor:
        rows, wanted = logits.detach().flatten(0, -2), targets.flatten() - vocabulary.offset
        counts = targets.flatten() != MASKED
        work = torch.promote_types(logits.dtype, torch.float32)
        top = rows.amax(dim=-1).to(work)
        vocabulary.maximum(top)
        sums = torch.empty((2, len(rows)), dtype=work, device=logits.device)
        here = (wanted >= 0) & (wanted < rows.shape[1]) & counts
        column = wanted.clamp(0, rows.shape[1] - 1)
        sums[1] = torch.where(here, rows.gather(1, column[:, None]).squeeze(1) - top, 0.0)
        for part in _chunks(rows):
            sums[0, part] = passes.sums(rows[part], top[part])
        vocabulary.total(sums)
        log_sum = sums[0].log()
        partition = log_sum + top
        ctx.save_for_backward(logits, torch.where(counts, column, MASKED), here, partition)
        ctx.z_loss, ctx.passes = z_loss, passes
        losses = log_sum - sums[1]
        losses = losses + z_loss * partition.square() if z_loss else losses
        return torch.where(counts, losses, 0.0).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, column, here, partition = ctx.saved_tensors
        grad = torch.where(column == MASKED, 0.0, grads[0].flatten().to(partition.dtype))
        column = column.clamp(min=0)[:, None]
        weight = grad * (1.0 + 2.0 * ctx.z_loss * partition) if ctx.z_loss else grad
        rows = logits.detach().flatten(0, -2)
        # In the precision of the partition: near 1 a probability less the whole is lost in that of the logits.
        at_target = (rows.gather(1, column).squeeze(1) - partition).exp_() * weight - torch.where(here, grad, 0.0)
        for part in _chunks(rows):
            ctx.passes.gradient(rows[part], partition[part], weight[part])
        rows.scatter_(1, column, at_target[:, None].to(rows.dtype))
        return rows.view_as(logits), None, None, None, None


def _chunks(rows: Tensor) -> list[slice]:
    """Slices of rows small enough to stay in cache; a single one on an accelerator's larger scale."""
    elements = CPU_CHUNK_ELEMENTS if rows.device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
    size = max(1, elements // max(1, rows.shape[1]))
    return [slice(start, start + size) for start in range(0, len(rows), size)]
