"""LayeredExecutor: several stages on one rank, each of which all microbatches pass before the next one (layered
gradient accumulation, 2106.02679; breadth-first, 2211.05953, on one pipeline rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright import schedule
from meshwright.parallel.passes import LossFunction, Passes
from meshwright.parallel.pipeline import reach
from meshwright.parallel.stages.torch_compat import Reach
from meshwright.parallel.synchronize import Synchronizer
from meshwright.schedule import planned
from meshwright.spec.plan import Plan
from meshwright.spec.span import Recorder


class _Rows(NamedTuple):
    """One microbatch."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    ahead: Tensor | None


class LayeredExecutor:
    """The stages of a plan without a pipeline axis, in model order, played in the order of the plan's table.

    `parts`, `synchronizers`, `loss_function` and what comes back are those of PipelineExecutor.
    """

    def __init__(
        self,
        *,
        parts: Sequence[nn.Module],
        synchronizers: Sequence[Synchronizer],
        plan: Plan,
        loss_function: LossFunction,
        recorder: Recorder,
    ) -> None:
        assert plan.pipeline == 1, "stages of several ranks are a pipeline"
        assert len(parts) == len(synchronizers) == len(plan.stages), "one part and one synchronizer for each stage"
        self._parts, self._synchronizers, self._plan = tuple(parts), tuple(synchronizers), plan
        self._loss_function, self._recorder = loss_function, recorder

    def step(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None, ahead: Tensor | None = None
    ) -> Tensor:
        """Every microbatch went forward and backward through every stage; gradients are accumulated and synchronised.

        All are (sequences, length) of this data rank. Returns the sum of its loss shares.
        """
        rows = self._rows(tokens, targets, documents, ahead)
        passes, outputs = self._passes(len(rows)), [row.tokens for row in rows]
        inputs: dict[tuple[int, int], Tensor] = {}
        results: dict[tuple[int, int], Tensor] = {}
        shares: list[Tensor] = []
        reaches = [reach(self._plan, stage) for stage in range(len(self._parts))]
        for action in self._table(len(rows)):
            stage, index = action.stage, action.microbatch
            if action.work is schedule.Work.FORWARD:
                x = outputs[index].detach().requires_grad_(reaches[stage] is Reach.WHOLE)
                inputs[stage, index] = x
                passes[stage].before_forward(index)
                result = self._forward(stage, x, rows[index])
                passes[stage].after_forward(index)
                results[stage, index] = outputs[index] = result
                continue
            last = index == len(rows) - 1
            result = results.pop((stage, index))
            ends = stage + 1 == len(self._parts)
            above = None if ends else inputs.pop((stage + 1, index)).grad
            if reaches[stage] is not Reach.STILL:
                passes[stage].backward(index, result, above, whole=True, last=last)
            if ends:
                shares.append(result.detach())
            if last:
                passes[stage].reduce()
        return torch.stack(shares).sum()

    def evaluate(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None, ahead: Tensor | None = None
    ) -> Tensor:
        """As `step`, forward only: no gradient is made or touched."""
        rows = self._rows(tokens, targets, documents, ahead)
        outputs = [row.tokens for row in rows]
        with torch.no_grad():
            for stage in range(len(self._parts)):
                outputs = [self._forward(stage, x, row) for x, row in zip(outputs, rows, strict=True)]
                self._synchronizers[stage].after_evaluation()
        return torch.stack(outputs).sum()

    def _forward(self, stage: int, x: Tensor, row: _Rows) -> Tensor:
        """Hidden features, or the loss share of the last stage."""
        output: Tensor = self._parts[stage](x, documents=row.documents, ahead=row.ahead)
        return self._loss_function(output, row.targets) if stage + 1 == len(self._parts) else output

    def _rows(self, *batch: Tensor | None) -> list[_Rows]:
        """What there is of each microbatch; the last one may be smaller."""
        assert batch[0] is not None
        parts = -(-len(batch[0]) // self._plan.microbatch)
        given = (repeat(None, parts) if x is None else x.split(self._plan.microbatch) for x in batch)
        return [_Rows(*row) for row in zip(*given, strict=True)]

    def _passes(self, count: int) -> list[Passes]:
        return [
            Passes(
                stage=stage,
                synchronizer=synchronizer,
                weights=None,
                split=frozenset(),
                count=count,
                recorder=self._recorder,
            )
            for stage, synchronizer in enumerate(self._synchronizers)
        ]

    def _table(self, microbatches: int) -> tuple[schedule.Action, ...]:
        return planned.table(planned.of_first(self._plan.schedule, microbatches), pipeline=1)[0]
