"""Probes: the same design with fewer layers on one pipeline rank and fewer microbatches, all else as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.traffic_turns import shares_turns
from meshwright.run.dry.extend import LONGER
from meshwright.run.dry.names import passes_of
from meshwright.schedule import planned
from meshwright.schedule.build import SPLIT, V_SHAPES
from meshwright.schedule.moves import PATIENT_SENDS
from meshwright.schedule.program import FORWARD, INPUT, Program
from meshwright.schedule.rows import one_for_one, run, with_weights
from meshwright.spec.model import Layer, Mixture
from meshwright.spec.plan import BlockGroup, Design, Plan, Schedule, ScheduleKind, Stage

SHORTEST = 2  # repetitions of a run of layers that the shortest probe keeps: a first and a last
LONGEST_UNIT = 8
FEWEST_MICROBATCHES = 5  # three to begin with, one that stands for those between, and the last
FEWEST_SLICED = 3  # the first, one that stands for those between, and the last
FEWEST_SPLIT = 9  # with the longest lag, two or more of each half after each half beside the first
FEWEST_ALIKE = 4  # before sends are waited for (PATIENT_SENDS of them), and two to be alike
_LONGEST_LAG = PATIENT_SENDS + 3  # of halves of weights: two wait for one another, and for no gradient that was sent

Content = tuple[Layer, BlockGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Layers of a stage: `unit` of them `count` times, with others before and after."""

    before: tuple[Content, ...]
    unit: tuple[Content, ...]
    count: int
    after: tuple[Content, ...]

    def of(self, count: int) -> tuple[Content, ...]:
        """The layers with the unit `count` times."""
        return (*self.before, *(self.unit * count), *self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Designs of one pipeline rank: a short one, from which `more` repetitions are missing, and one with LONGER
    repetitions more. One design and 0 where nothing was left out."""

    designs: tuple[Design, ...]
    more: int


def shrunk(design: Design, *, rank: int, whole: bool) -> Probe:
    """Probes of pipeline rank `rank`; of the whole model where `whole` is asked or little would be saved, and where
    learners send it in fragments, which are of whatever blocks all of it has."""
    plan = design.plan
    if plan.sends_fragments:
        return Probe(designs=(design,), more=0)
    runs = [_run(_contents(design, plan.stages[index])) for index in plan.stages_of(rank)]
    most = min(run.count for run in runs)
    if whole or most <= SHORTEST + SHORTEST + LONGER:
        return Probe(designs=(_alone(design, rank, [run.of(run.count) for run in runs]),), more=0)
    more = most - SHORTEST
    lengths = (more, more - LONGER)
    return Probe(
        designs=tuple(_alone(design, rank, [run.of(run.count - fewer) for run in runs]) for fewer in lengths),
        more=more,
    )


def fewer_microbatches(design: Design, *, rank: int) -> Design:
    """The design with so many microbatches as tell all of those on pipeline rank `rank` apart; as it is where it has no
    more than those, and where microbatches have paths.

    Stages in loops are run one after another, which any number of microbatches may be. Where some backwards are whole
    and others split, it is as many as have every pass of the whole step, among the same passes.
    """
    plan = design.plan
    if plan.pipeline > 1 and plan.schedule.paths:
        return design
    if planned.splits(plan.schedule) and not is_split(plan):
        found = _with_every_pass(plan, rank=rank)
        return design if found is None else replace(design, plan=replace(plan, schedule=found))
    number = FEWEST_SPLIT if is_split(plan) else FEWEST_SLICED if plan.schedule.slices > 1 else FEWEST_MICROBATCHES
    if plan.schedule.microbatches <= number:
        return design
    loops = plan.schedule.kind is ScheduleKind.INTERLEAVED
    few = _loops(plan, number) if loops else planned.of_first(plan.schedule, number)
    refused = plan.pipeline > 1 and planned.problems(few, pipeline=plan.pipeline)
    return design if refused else replace(design, plan=replace(plan, schedule=few))


def _with_every_pass(plan: Plan, *, rank: int) -> Schedule | None:
    """The plan's schedule with the fewest microbatches in which pipeline rank `rank` runs every pass that it does in
    the whole step, the frequent ones FEWEST_ALIKE times or more; None where that takes most of them."""
    whole = passes_of(plan, rank=rank)
    for number in range(1, plan.schedule.microbatches * 2 // 3):
        few = planned.of_outer(plan.schedule, number)
        if planned.problems(few, pipeline=plan.pipeline):
            continue
        found = passes_of(replace(plan, schedule=few), rank=rank)
        if all(found[place] >= min(whole[place], FEWEST_ALIKE) for place in whole):
            # As a table, of which any number of microbatches may be played first.
            return planned.of(planned.program(few, pipeline=plan.pipeline), chunks=plan.schedule.chunks)
    return None


def _loops(plan: Plan, microbatches: int) -> Schedule:
    """Stages in loops one after another, as a table, in which microbatches never share what is gathered."""
    made = replace(plan.schedule, kind=ScheduleKind.BREADTH_FIRST, microbatches=microbatches)
    return planned.of(planned.program(made, pipeline=plan.pipeline), chunks=plan.schedule.chunks)


def keeps_order(plan: Plan, *, of: Plan) -> bool:
    """Whether ranks of a probe's `plan` run passes in the order of the plan it is `of`, and so each in its own."""
    return plan.schedule == of.schedule or (planned.splits(of.schedule) and not is_split(of))


def is_split(plan: Plan) -> bool:
    """Whether the plan splits every backward."""
    return plan.pipeline > 1 and plan.schedule.kind in SPLIT - V_SHAPES


def split(plan: Plan, *, rank: int) -> Schedule:
    """That of a plan that splits every backward, but that on every rank as many halves of weights wait as on `rank`, or
    so many that more make no difference."""
    depth, pipeline, microbatches = _depth(plan.schedule.kind), plan.pipeline, plan.schedule.microbatches
    lag = rank * depth if rank * depth <= PATIENT_SENDS else _LONGEST_LAG
    every, rows = np.arange(microbatches), []
    for place in range(pipeline):
        forward, backward = run(FORWARD, place, every), run(INPUT, place, every)
        rows.append(with_weights(one_for_one(forward, backward, warm_up=depth * (pipeline - place - 1)), lag=lag))
    return planned.of(Program.of(rows, stages=pipeline, microbatches=microbatches), chunks=1)


def _depth(kind: ScheduleKind) -> int:
    return 2 if kind is ScheduleKind.ZERO_BUBBLE_H2 else 1


def _contents(design: Design, stage: Stage) -> tuple[Content, ...]:
    """Every layer of a stage with its settings."""
    last = len(design.model.layers) + 1
    return tuple(
        (design.model.layers[block - 1], replace(group, start=0, stop=1))
        for group in stage.groups
        for block in range(max(group.start, 1), min(group.stop, last))
    )


def _run(contents: Sequence[Content]) -> Run:
    """The run of repetitions that leaves the fewest layers beside it."""
    best = Run(before=tuple(contents), unit=(), count=0, after=())
    saved = 0
    for length in range(1, min(LONGEST_UNIT, len(contents)) + 1):
        begin = 0
        while begin + length <= len(contents):
            count = 1
            unit = contents[begin : begin + length]
            while contents[begin + count * length : begin + (count + 1) * length] == unit:
                count += 1
            if count * length - SHORTEST * length > saved:
                saved = count * length - SHORTEST * length
                end = begin + count * length
                best = Run(before=tuple(contents[:begin]), unit=tuple(unit), count=count, after=tuple(contents[end:]))
            begin += max(1, (count - 1) * length)
    return best


def _is_balanced(layer: Layer) -> bool:
    return isinstance(layer.transform, Mixture) and bool(layer.transform.routing.bias_rate)


def _alone(design: Design, rank: int, held: Sequence[tuple[Content, ...]]) -> Design:
    """The design with these layers on the stages of pipeline rank `rank` and none on others, but where every rank adds
    up how often the experts of all were chosen."""
    plan, model = design.plan, design.model
    layers: list[Layer] = []
    stages: list[Stage] = []
    contents = iter(held)
    last, told = len(plan.stages) - 1, any(_is_balanced(layer) for layer in model.layers)
    for index, stage in enumerate(plan.stages):
        own = next(contents) if stage.rank == rank else _contents(design, stage) if told else ()
        first = stage.groups[0]
        groups = [replace(first, start=0, stop=1)] if index == 0 else []
        for layer, group in own:
            layers.append(layer)
            groups.append(replace(group, start=len(layers), stop=len(layers) + 1))
        if index == last:
            groups.append(replace(stage.groups[-1], start=len(layers) + 1, stop=len(layers) + 2))
        place = len(layers) + 1
        stages.append(replace(stage, groups=tuple(groups) or (replace(first, start=place, stop=place),)))
    laid: Plan = replace(plan, stages=tuple(stages))
    if shares_turns(laid) and not shares_turns(plan):
        # Layers that are left out kept microbatches from sharing: the same passes as a table, in which they never do.
        program = planned.program(plan.schedule, pipeline=plan.pipeline)
        laid = replace(laid, schedule=planned.of(program, chunks=plan.schedule.chunks))
    return replace(design, plan=laid, model=replace(model, layers=tuple(layers)))
