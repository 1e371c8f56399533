"""PipelineExecutor: runs a schedule's table on torch's pipeline runtime, for one pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright import schedule
from meshwright.parallel.passes import LossFunction, Passes, split_passes
from meshwright.parallel.split import WeightGradients
from meshwright.parallel.synchronize import Synchronizer
from meshwright.parallel.torch_compat import TableStage, table_runtime
from meshwright.spec.plan import Plan
from meshwright.spec.span import Recorder


class PipelineExecutor:
    """The local stages of one pipeline rank and the table they follow.

    `parts` are the stages of this rank in model order, laid out already; a part takes (x, documents=...) and returns
    hidden features of `hidden`'s shape and dtype, or logits when it is the model's last stage. `loss_function` turns
    (logits, targets) of one microbatch into its share of the loss, such that shares and their gradients add up.
    `synchronizers` belong to `parts`, one each, and so do `weights` where the schedule splits backwards.
    """

    def __init__(
        self,
        *,
        parts: Sequence[nn.Module],
        synchronizers: Sequence[Synchronizer],
        weights: Sequence[WeightGradients | None],
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        hidden: Tensor,
        loss_function: LossFunction,
        recorder: Recorder,
    ) -> None:
        self._plan = plan
        self._rank = dist.get_rank(group)
        self._indexes = plan.stages_of(self._rank)
        assert plan.pipeline > 1, "one rank needs no pipeline"
        assert len(parts) == len(synchronizers) == len(self._indexes), "one part and one synchronizer for each stage"
        self._group, self._device = group, device
        self._hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device="meta", requires_grad=True)
        self._synchronizers, self._weights = tuple(synchronizers), tuple(weights)
        self._recorder = recorder
        last = len(plan.stages) - 1
        self._parts = [
            StagePart(part, hidden=self._hidden, loss_function=loss_function if index == last else None)
            for index, part in zip(self._indexes, parts, strict=True)
        ]
        self._runtimes: dict[tuple[int, bool], Any] = {}

    @property
    def embeds(self) -> bool:
        """This rank holds the first stage."""
        return 0 in self._indexes

    @property
    def predicts(self) -> bool:
        """This rank holds the last stage, with the head and the loss."""
        return len(self._plan.stages) - 1 in self._indexes

    def step(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Every microbatch went forward and backward through every stage; gradients are accumulated and synchronised.

        All three are (sequences, length) of this data rank, the same on each of its pipeline ranks; tokens and
        targets hold what a context axis leaves this rank, documents the whole sequence. Returns the sum of the loss
        shares of this data rank, 0 on ranks without the head.
        """
        return self._run(tokens, targets, documents, train=True)

    def evaluate(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """As `step`, forward only: no gradient is made or touched."""
        with torch.no_grad():
            total = self._run(tokens, targets, documents, train=False)
        for synchronizer in self._synchronizers:
            synchronizer.after_evaluation()
        return total

    def _run(self, tokens: Tensor, targets: Tensor, documents: Tensor | None, *, train: bool) -> Tensor:
        microbatches = tokens.shape[0] // self._plan.microbatch
        assert microbatches * self._plan.microbatch == tokens.shape[0], "whole microbatches"
        runtime = self._runtime(microbatches, train=train)
        extra: dict[str, Tensor] = {} if documents is None else {"documents": documents}
        if self.predicts:
            extra["targets"] = targets
        losses: list[Tensor] = []
        run = runtime.step if train else runtime.eval
        inputs = (tokens,) if self.embeds else ()
        run(*inputs, target=targets if self.predicts else None, losses=losses, return_outputs=False, **extra)
        for stage in runtime._stages:
            stage.finish()
        dtype = torch.promote_types(self._hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=self._device)
        for loss in losses:
            total += loss.detach()
        return total

    def _runtime(self, microbatches: int, *, train: bool) -> Any:
        """One runtime for each number of microbatches and mode: shapes are agreed on once, never in a later step."""
        if (microbatches, train) not in self._runtimes:
            table = self._table(microbatches) if train else _forward_table(self._plan, microbatches)
            rows = [[str(action) for action in row] for row in table]
            stages = [
                self._stage(place, split=split_passes(table, index), microbatches=microbatches)
                for place, index in enumerate(self._indexes)
            ]
            self._runtimes[microbatches, train] = table_runtime(stages, rows=rows, microbatches=microbatches)
        return self._runtimes[microbatches, train]

    def _table(self, microbatches: int) -> schedule.Table:
        plan = self._plan
        return schedule.build(
            plan.schedule.kind, pipeline=plan.pipeline, chunks=plan.schedule.chunks, microbatches=microbatches
        )

    def _stage(self, place: int, *, split: frozenset[int], microbatches: int) -> TableStage:
        index, plan = self._indexes[place], self._plan
        length = plan.sequence_length // plan.context
        tokens = torch.empty(plan.microbatch, length, dtype=torch.int64, device="meta")
        scalar = torch.empty((), dtype=torch.promote_types(self._hidden.dtype, torch.float32), device="meta")
        return TableStage(
            self._parts[place],
            index,
            len(plan.stages),
            device=self._device,
            group=self._group,
            example_input=self._hidden if index else tokens,
            example_output=self._hidden if index + 1 < len(plan.stages) else scalar,
            calls=Passes(
                stage=index,
                synchronizer=self._synchronizers[place],
                weights=self._weights[place],
                split=split,
                count=microbatches,
                recorder=self._recorder,
            ),
        )


class StagePart(nn.Module):
    """One stage as the runtime sees it: hidden features out, or the loss share when it holds `loss_function`."""

    def __init__(self, part: nn.Module, *, hidden: Tensor, loss_function: LossFunction | None) -> None:
        super().__init__()
        self.part = part
        self._sends = (hidden.shape, hidden.dtype)
        self._loss_function = loss_function

    def forward(self, x: Tensor, *, documents: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        output: Tensor = self.part(x, documents=documents)
        if self._loss_function is not None:
            assert targets is not None, "the last stage is given targets"
            return self._loss_function(output, targets)
        assert (output.shape, output.dtype) == self._sends, f"stage sends {output.dtype} {tuple(output.shape)}"
        return output


def _forward_table(plan: Plan, microbatches: int) -> schedule.Table:
    """Chunk by chunk, every microbatch: any number of microbatches. The runtime does nothing in the backwards."""
    rows = []
    for rank in range(plan.pipeline):
        stages = plan.stages_of(rank)
        order = [(schedule.Work.FORWARD, stage) for stage in stages]
        order += [(schedule.Work.BACKWARD, stage) for stage in reversed(stages)]
        rows.append(
            tuple(
                schedule.Action(work=work, stage=stage, microbatch=microbatch)
                for work, stage in order
                for microbatch in range(microbatches)
            )
        )
    return tuple(rows)
