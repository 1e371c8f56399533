"""SkipPipe for the best plans: microbatches that leave out stages, where the job allows it and a step gains by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost import Layout, PlanTable
from meshwright.cost.evaluate import stage_seconds
from meshwright.cost.placed import as_placed
from meshwright.cost.predict import predict
from meshwright.schedule import planned
from meshwright.schedule.skip import Line, skipping
from meshwright.search.check import check
from meshwright.search.refine import Entry, entry_order, entry_value
from meshwright.search.rules import Scope
from meshwright.search.stages import balanced_stages
from meshwright.spec.job import JobSpec, Objective
from meshwright.spec.plan import Design, Plan, Schedule, ScheduleKind
from meshwright.spec.skip import ROUNDED
from meshwright.spec.units import format_percent

WORTH = 0.01  # of what the objective minimises, that leaving out must save
PLANS = 2  # that are tried, the best first
TRIED = 2  # layouts of each, for which paths are sought
MOST_PASSES = 40_000  # of a step, whose orders are tried
_LAYOUTS = 9  # from inner stages that hold as much as so few passes ask to those of half an even share
_LEAST = 2.0  # what a layer weighs on the latter
_SCOPES = frozenset({Scope.PLAN, Scope.RUNTIME})


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """The best plan whose microbatches leave out stages, in `words`; `entry` where it pays."""

    entry: Entry | None
    words: str


def skip(ranked: Sequence[Entry], job: JobSpec) -> Skipped:
    """What plans made of the best ones, `ranked`, gain where microbatches leave out stages; the same anywhere."""
    objective, best = job.objective, ranked[0]
    able = [entry for entry in ranked if _is_able(entry[0])][:PLANS]
    if not able:
        return _none("none of the best plans has four pipeline ranks or more of one trained stage each")
    made = [found for entry in able for found in _made(entry[0])]
    if not made:
        return _none("stages would have to be left out of more layers than job.skip.share, or rules refuse it")
    table, gap = min(made, key=lambda each: entry_order(each[0], objective))
    if not table[1].fits:
        return _none("what could be made does not fit")
    saved = 1.0 - entry_value(table, objective) / entry_value(best, objective)
    words = _words(best, table, gap=gap, objective=objective, pays=saved > WORTH)
    return Skipped(entry=table if saved > WORTH else None, words=words)


def _none(why: str) -> Skipped:
    return Skipped(entry=None, words=f"no microbatch leaves out stages: {why}")


def _is_able(design: Design) -> bool:
    plan = design.plan
    few = 2 * len(plan.stages) * plan.schedule.microbatches <= MOST_PASSES
    whole = plan.schedule.chunks == 1 and not plan.frozen_blocks
    return plan.pipeline > 3 and whole and few and plan.schedule.microbatches > 1


def _made(design: Design) -> Iterator[tuple[Entry, float]]:
    """The design with stages and paths that leave out as much as its job allows, and how far each may be from the
    shortest order; of those that rules refuse no more than the design itself."""
    tried, refused = [], set(check(design, scopes=_SCOPES))
    for skipped in range(1, design.plan.pipeline - 2):
        for plan in _laid(design, skipped):
            line, passing = _line(replace(design, plan=plan)), _passing(plan.pipeline, skipped)
            each = zip(line.forward, line.backward, passing, strict=True)
            tried.append((max((f + b) * share for f, b, share in each), skipped, plan, line))
    for _, skipped, plan, line in sorted(tried, key=lambda one: one[:2])[:TRIED]:
        for ahead in sorted({0, 2, plan.pipeline // 2}):  # microbatches under way beyond those of 1F1B
            count, swap = plan.schedule.microbatches, design.job.skip.swap
            found = skipping(line, microbatches=count, skipped=skipped, ahead=ahead, swap=swap)
            made = replace(design, plan=replace(plan, schedule=planned.of(found.program, chunks=1)))
            if not set(check(made, scopes=_SCOPES)) - refused:
                yield (made, predict(made)), found.seconds / found.bound - 1.0


def _passing(pipeline: int, skipped: int) -> tuple[float, ...]:
    """The share of microbatches that pass each stage."""
    inner = pipeline - 2
    return (1.0, *(1.0 - skipped / inner,) * inner, 1.0)


def _laid(design: Design, skipped: int) -> Iterator[Plan]:
    """Plans under 1f1b whose inner stages are as large as so few passes ask and the job's share of layers allows."""
    plan, job = replace(design.plan, schedule=_plain(design.plan)), design.job
    count, inner = plan.schedule.microbatches, plan.pipeline - 2
    if count * (inner - skipped) < inner:
        return
    cluster, table, told = as_placed(plan, design.cluster), PlanTable.from_plan(plan), set()
    for weight in np.linspace(_passing(plan.pipeline, skipped)[1], _LEAST, _LAYOUTS).tolist():
        boundaries = balanced_stages(
            design.model,
            cluster,
            job,
            precision=plan.first_group.precision,
            tensor=plan.tensor,
            microbatch=plan.microbatch,
            weights=(1.0, *(weight,) * inner, 1.0),
        )
        bounds = tuple(boundaries(plan.pipeline, range(plan.pipeline), plan.world_size))
        left_out = (bounds[-2] - bounds[1]) * skipped / inner / max(len(design.model.layers), 1)
        if bounds in told or left_out > job.skip.share + ROUNDED:
            continue
        told.add(bounds)
        layout = Layout(bounds=bounds, ranks=tuple(range(plan.pipeline)))
        one = replace(table, layout=np.zeros_like(table.layout), layouts=(layout,))
        laid = one.to_plan(0, model=plan.model, cluster=plan.cluster, sequence_length=plan.sequence_length)
        yield replace(laid, placement=plan.placement)


def _plain(plan: Plan) -> Schedule:
    return Schedule(kind=ScheduleKind.ONE_F_ONE_B, microbatches=plan.schedule.microbatches)


def _line(design: Design) -> Line:
    """Predicted seconds of the stages of a plan."""
    plan, cluster = design.plan, as_placed(design.plan, design.cluster)
    job = replace(design.job, sequence_length=plan.sequence_length, batch_tokens=plan.batch_tokens)
    seconds = stage_seconds(PlanTable.from_plan(plan), model=design.model, cluster=cluster, job=job)
    return Line(
        forward=tuple(stage.forward for stage in seconds),
        backward=tuple(stage.backward for stage in seconds),
        transfer=tuple(stage.transfer for stage in seconds),
    )


def _words(best: Entry, table: Entry, *, gap: float, objective: Objective, pays: bool) -> str:
    plan, (_, report) = table[0].plan, table
    left_out = f"{format_percent(plan.skipped_share)} of the layers on the mean"
    gain = format_percent(best[1].step_seconds / report.step_seconds - 1.0)
    if not pays:
        more = format_percent(entry_value(table, objective) / entry_value(best, objective) - 1.0)
        return f"no plan whose microbatches leave out stages pays: the best leaves out {left_out} and takes {more} more"
    least = f"no order of their passes is shorter by more than {format_percent(1.0 - 1.0 / (1.0 + max(gap, 0.0)))}"
    return (
        f"microbatches that leave out {left_out}, as job.skip allows, in a pipeline of {plan.pipeline}: {gain} faster "
        f"than the best plan of whole passes; {least}; the quality is not that of the full model and has to be measured"
    )
