"""Adafactor over matrices that ranks share: means of rows and columns, and the size of an update, are of the whole.

Adafactor (1804.04235). A stack of experts has means of its own for each. Gradients are overwritten by updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.clip import local_part
from meshwright.parallel.shards import cuts, sum_over, without_dim, zeros_as
from meshwright.spec.optimizer import Adafactor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One parameter's local parts, and the groups over which its last dim and the one before it are divided."""

    whole: torch.Size
    parameter: Tensor
    update: Tensor
    state: dict[str, Tensor]
    across: tuple[dist.ProcessGroup, ...]
    down: tuple[dist.ProcessGroup, ...]

    @property
    def is_matrix(self) -> bool:
        return len(self.whole) > 1


class AdafactorRule:
    """State of a matrix is `row` and `column`, means of squared gradients; of a vector `square`. `step` counts."""

    def __init__(self, spec: Adafactor) -> None:
        self._spec = spec

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32)
        if parameter.dim() < 2:
            return {"step": step, "square": zeros_as(parameter)}
        last = parameter.dim() - 1
        return {"step": step, "row": without_dim(parameter, last), "column": without_dim(parameter, last - 1)}

    def step(
        self, held: Sequence[Tensor], states: Sequence[dict[str, Tensor]], *, rate: float, weight_decay: float
    ) -> None:
        """Every parameter took one step. Collective over the ranks that share one."""
        entries = [_entry(parameter, state) for parameter, state in zip(held, states, strict=True)]
        self._fade(entries)
        self._scale(entries)
        squares = [_sum_of_squares(entry) for entry in entries]
        sum_over([(total, entry.across + entry.down) for total, entry in zip(squares, entries, strict=True)])
        for entry, total in zip(entries, squares, strict=True):
            matrix = entry.whole[-2:] if entry.is_matrix else entry.whole
            size = (total / math.prod(matrix)).sqrt()
            factor = rate / (size / self._spec.clip_update).clamp(min=1.0)
            entry.parameter.mul_(1.0 - rate * weight_decay)
            entry.parameter.sub_(entry.update * (factor[..., None, None] if entry.is_matrix else factor))

    def _fade(self, entries: list[_Held]) -> None:
        """Second moments are those after this step."""
        sums = [_squares(entry, self._spec.epsilon_squared) for entry in entries]
        sum_over(
            [
                (total, over)
                for entry, totals in zip(entries, sums, strict=True)
                for total, over in zip(totals, (entry.across, entry.down), strict=False)
                if entry.is_matrix
            ]
        )
        for entry, totals in zip(entries, sums, strict=True):
            entry.state["step"] += 1
            kept = 1.0 - float(entry.state["step"]) ** -self._spec.decay_exponent
            lengths = (entry.whole[-1], entry.whole[-2]) if entry.is_matrix else (1,)
            for total, length, name in zip(totals, lengths, _names(entry), strict=True):
                local_part(entry.state[name]).mul_(kept).add_(total, alpha=(1.0 - kept) / length)

    def _scale(self, entries: list[_Held]) -> None:
        """Updates are gradients over the roots of their second moments."""
        matrices = [entry for entry in entries if entry.is_matrix]
        means = [local_part(entry.state["row"]).sum(dim=-1, keepdim=True) for entry in matrices]
        sum_over([(mean, entry.down) for mean, entry in zip(means, matrices, strict=True)])
        for entry, mean in zip(matrices, means, strict=True):
            row = local_part(entry.state["row"]) / (mean / entry.whole[-2])
            entry.update.mul_(row.rsqrt()[..., None]).mul_(local_part(entry.state["column"]).rsqrt()[..., None, :])
        for entry in entries:
            if not entry.is_matrix:
                entry.update.mul_(local_part(entry.state["square"]).rsqrt())


def _entry(parameter: Tensor, state: dict[str, Tensor]) -> _Held:
    assert parameter.grad is not None
    last = parameter.dim() - 1
    divided = cuts(parameter)
    return _Held(
        whole=parameter.shape,
        parameter=local_part(parameter.detach()),
        update=local_part(parameter.grad),
        state=state,
        across=tuple(cut.group for cut in divided if cut.dim == last),
        down=tuple(cut.group for cut in divided if cut.dim == last - 1),
    )


def _names(entry: _Held) -> tuple[str, ...]:
    return ("row", "column") if entry.is_matrix else ("square",)


def _squares(entry: _Held, epsilon: float) -> tuple[Tensor, ...]:
    """This rank's part of the sums of squared gradients over rows and over columns; of a vector the squares."""
    squares = entry.update.square().add_(epsilon)
    return (squares.sum(dim=-1), squares.sum(dim=-2)) if entry.is_matrix else (squares,)


def _sum_of_squares(entry: _Held) -> Tensor:
    squares = entry.update.square()
    return squares.sum(dim=(-2, -1)) if entry.is_matrix else squares.sum()
