"""PipelineExecutor: runs a schedule's table on torch's pipeline runtime, for one pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright import schedule
from meshwright.nn.context import KnownAngles
from meshwright.parallel.passes import LossFunction, Passes, split_passes
from meshwright.parallel.routed import Route, RoutedStage
from meshwright.parallel.slices import SliceStore, cut, repeat
from meshwright.parallel.split import WeightGradients
from meshwright.parallel.stages.torch_compat import Reach, TableStage, table_runtime
from meshwright.parallel.synchronize import Synchronizer
from meshwright.schedule import planned
from meshwright.schedule.moves import with_moves
from meshwright.spec.plan import Plan
from meshwright.spec.span import Recorder


class PipelineExecutor:
    """The local stages of one pipeline rank and the table they follow.

    `parts` are the stages of this rank in model order, laid out already; a part takes (x, documents=..., ahead=...) and
    returns hidden features of `hidden`'s shape and dtype, or logits when it is the model's last stage. `loss_function`
    turns (logits, targets) of one microbatch into its share of the loss, such that shares and their gradients add up.
    Where the plan cuts microbatches, `hidden` is of one slice, and a part takes (x, context=...) and has
    `known_angles`. `synchronizers` belong to `parts`, one each, and so do `weights` where the schedule splits
    backwards.
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
        self._slices = [_slice_store(plan, stage) for stage in self._indexes]
        self._parts = [
            StagePart(part, hidden=self._hidden, loss_function=loss_function if index == last else None, slices=slices)
            for index, part, slices in zip(self._indexes, parts, self._slices, strict=True)
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

    def step(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None, ahead: Tensor | None = None
    ) -> Tensor:
        """Every microbatch went forward and backward through every stage; gradients are accumulated and synchronised.

        All are (sequences, length) of this data rank, the same on each of its pipeline ranks; tokens and targets hold
        what a context axis leaves this rank, documents and ahead the whole sequence. Returns the sum of the loss
        shares of this data rank, 0 on ranks without the head.
        """
        return self._run(tokens, targets, {"documents": documents, "ahead": ahead}, train=True)

    def evaluate(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None, ahead: Tensor | None = None
    ) -> Tensor:
        """As `step`, forward only: no gradient is made or touched."""
        with torch.no_grad():
            total = self._run(tokens, targets, {"documents": documents, "ahead": ahead}, train=False)
        for synchronizer in self._synchronizers:
            synchronizer.after_evaluation()
        return total

    def _run(self, tokens: Tensor, targets: Tensor, beside: Mapping[str, Tensor | None], *, train: bool) -> Tensor:
        microbatches = tokens.shape[0] // self._plan.microbatch
        assert microbatches * self._plan.microbatch == tokens.shape[0], "whole microbatches"
        number = self._plan.schedule.slices
        runtime = self.runtime(microbatches, train=train)
        tokens, targets = (cut(x, microbatch=self._plan.microbatch, number=number) for x in (tokens, targets))
        given = {name: x for name, x in beside.items() if x is not None}
        extra = {name: repeat(x, microbatch=self._plan.microbatch, number=number) for name, x in given.items()}
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

    def runtime(self, microbatches: int, *, train: bool) -> Any:
        """torch's runtime, one for each number of microbatches and mode: shapes are agreed on once, never in a later
        step."""
        if (microbatches, train) not in self._runtimes:
            routed = train and self._plan.schedule.paths
            made = self._along_paths(microbatches) if routed else self._in_turn(microbatches, train=train)
            self._runtimes[microbatches, train] = made
        return self._runtimes[microbatches, train]

    def _in_turn(self, microbatches: int, *, train: bool) -> Any:
        """Microbatches that pass every stage in turn, as all do in evaluation."""
        passes = microbatches * self._plan.schedule.slices
        table = self._table(microbatches) if train else _forward_table(self._plan, passes)
        rows = [[str(action) for action in row] for row in table]
        stages = [
            self._stage(place, split=split_passes(table, index), passes=passes)
            for place, index in enumerate(self._indexes)
        ]
        return table_runtime(stages, rows=rows, microbatches=passes)

    def _along_paths(self, microbatches: int) -> Any:
        """Microbatches that pass the stages of their paths."""
        entry = planned.of_first(self._plan.schedule, microbatches)
        program = planned.program(entry, pipeline=self._plan.pipeline)
        route = Route.of(program, self._rank)
        stage = self._stage(0, split=frozenset(), passes=route.last_forward + 1, route=route)
        return table_runtime([stage], rows=with_moves(program), microbatches=microbatches)

    def _table(self, microbatches: int) -> schedule.Table:
        """The plan's table with passes for microbatches: slice j of k of microbatch i is pass i * k + j."""
        entry, number = self._plan.schedule, self._plan.schedule.slices
        table = planned.table(planned.of_first(entry, microbatches), pipeline=self._plan.pipeline)
        return tuple(
            tuple(replace(action, microbatch=action.microbatch * number + action.slice, slice=0) for action in row)
            for row in table
        )

    def _stage(self, place: int, *, split: frozenset[int], passes: int, route: Route | None = None) -> TableStage:
        index, plan = self._indexes[place], self._plan
        length = plan.sequence_length // (plan.context * plan.schedule.slices)
        tokens = torch.empty(plan.microbatch, length, dtype=torch.int64, device="meta")
        scalar = torch.empty((), dtype=torch.promote_types(self._hidden.dtype, torch.float32), device="meta")
        make = TableStage if route is None else partial(RoutedStage, route=route)
        return make(
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
                count=passes,
                recorder=self._recorder,
                slices=self._slices[place],
            ),
            reach=reach(plan, index),
        )


def reach(plan: Plan, stage: int) -> Reach:
    """How far backward goes through stage `stage`: no further than the first block that is trained."""
    first, here = plan.first_trained_block, plan.stages[stage]
    if first < here.start:
        return Reach.WHOLE
    return Reach.OWN if first < here.stop else Reach.STILL


def _slice_store(plan: Plan, stage: int) -> SliceStore | None:
    number = plan.schedule.slices
    if number == 1:
        return None
    returns = reach(plan, stage) is not Reach.STILL
    return SliceStore(number=number, length=plan.sequence_length // number, returns=returns)


class StagePart(nn.Module):
    """One stage as the runtime sees it: hidden features out, or the loss share when it holds `loss_function`.

    With `slices` a pass sees the keys and values of the slices before it; `documents` are those of whole sequences.
    """

    def __init__(
        self, part: nn.Module, *, hidden: Tensor, loss_function: LossFunction | None, slices: SliceStore | None
    ) -> None:
        super().__init__()
        self.part = part
        self._sends = (hidden.shape, hidden.dtype)
        self._loss_function = loss_function
        self._slices = slices

    def forward(
        self,
        x: Tensor,
        *,
        documents: Tensor | None = None,
        ahead: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        output = self._features(x, documents, ahead)
        if self._loss_function is not None:
            assert targets is not None, "the last stage is given targets"
            return self._loss_function(output, targets)
        assert (output.shape, output.dtype) == self._sends, f"stage sends {output.dtype} {tuple(output.shape)}"
        return output

    def _features(self, x: Tensor, documents: Tensor | None, ahead: Tensor | None) -> Tensor:
        if self._slices is None:
            result: Tensor = self.part(x, documents=documents, ahead=ahead)
        else:
            assert ahead is None, "a prefix may reach beyond its slice"
            known = cast(KnownAngles, self.part.known_angles)
            context = self._slices.context(documents=documents, known_angles=known)
            result = self.part(x, context=context)
        return result


def _forward_table(plan: Plan, passes: int) -> schedule.Table:
    """Chunk by chunk, every pass: any number of them. The runtime does nothing in the backwards."""
    rows = []
    for rank in range(plan.pipeline):
        stages = plan.stages_of(rank)
        order = [(schedule.Work.FORWARD, stage) for stage in stages]
        order += [(schedule.Work.BACKWARD, stage) for stage in reversed(stages)]
        rows.append(
            tuple(
                schedule.Action(work=work, stage=stage, microbatch=index)
                for work, stage in order
                for index in range(passes)
            )
        )
    return tuple(rows)
