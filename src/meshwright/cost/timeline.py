"""One step of a plan as spans: its schedule table played by the event simulation at the predicted seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.cost.evaluate import evaluate, stage_seconds
from meshwright.cost.placed import as_placed
from meshwright.cost.simulate import Event, simulate
from meshwright.cost.table import PlanTable
from meshwright.schedule import planned
from meshwright.schedule.table import Work
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName
from meshwright.spec.span import Span

_NAMES = {Work.FORWARD: LineName.FORWARD}


def timeline(design: Design) -> tuple[Span, ...]:
    """Spans of one step on every pipeline rank, by LineName, from second 0 to the end of the predicted step.

    What is done once comes before and after the pipeline, first what the two copies of a tied table exchange, the next
    step's batch last; gathers and gradients of every
    microbatch, recompute and exchanges are in the span of their pass. Raises ConfigError for a plan that `predict`
    refuses.
    """
    plan, cluster = design.plan, as_placed(design.plan, design.cluster)
    job = replace(design.job, sequence_length=plan.sequence_length, batch_tokens=plan.batch_tokens)
    table = PlanTable.from_plan(plan)
    stages = stage_seconds(table, model=design.model, cluster=cluster, job=job)
    events = simulate(planned.program(plan.schedule, pipeline=plan.pipeline), stages=stages)
    costs = evaluate(table, model=design.model, cluster=cluster, job=job, every_rank=True)
    start = float(costs.figures["first_gather_seconds"][0])
    makespan = float(costs.figures["makespan_seconds"][0])
    scale = makespan / max(event.start + event.seconds for event in events)
    last = {
        LineName.GRADIENTS: float(costs.figures["last_reduce_seconds"][0]),
        LineName.OPTIMIZER: float(costs.parts[LineName.OPTIMIZER][0]),
        LineName.OUTER: float(costs.parts[LineName.OUTER][0]),
        LineName.INPUT: float(costs.parts[LineName.INPUT][0]),
        LineName.OTHER: float(costs.parts[LineName.OTHER][0]),
    }
    spans = [span for event in events for span in _spans(event, start, scale)]
    ends, tied = {plan.stages[0].rank, plan.stages[-1].rank}, float(costs.figures["tied_seconds"][0])
    for rank in range(plan.pipeline):
        first = {LineName.TRANSFER if rank in ends else LineName.BUBBLE: tied}
        spans += _in_turn({LineName.PARAMETERS: start}, rank=rank, start=0.0)
        spans += _in_turn(first | last, rank=rank, start=start + makespan)
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start)))


def _in_turn(seconds: Mapping[LineName, float], *, rank: int, start: float) -> list[Span]:
    """One span after the other, none of those that take no time."""
    spans = []
    for name, lasts in seconds.items():
        if lasts > 0.0:
            spans.append(Span(name=name, rank=rank, start=start, seconds=lasts))
            start += lasts
    return spans


def _spans(event: Event, begin: float, scale: float) -> list[Span]:
    start, seconds = begin + event.start * scale, event.seconds * scale
    action = event.action
    name = _NAMES.get(action.work, LineName.BACKWARD)
    spans = []
    if event.waited > 0.0:
        waited = event.waited * scale
        spans.append(Span(name=LineName.BUBBLE, rank=event.rank, start=start - waited, seconds=waited))
    spans.append(
        Span(
            name=name,
            rank=event.rank,
            start=start,
            seconds=seconds,
            stage=action.stage,
            microbatch=action.microbatch,
        )
    )
    return spans
