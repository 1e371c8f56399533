"""One step of a plan as spans: its schedule table played by the event simulation at the predicted seconds."""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost.evaluate import evaluate, stage_seconds
from meshwright.cost.simulate import Event, simulate
from meshwright.cost.table import PlanTable
from meshwright.schedule.build import program
from meshwright.schedule.table import Work
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName
from meshwright.spec.span import Span

_NAMES = {Work.FORWARD: LineName.FORWARD}


def timeline(design: Design) -> tuple[Span, ...]:
    """Spans of one step on every pipeline rank, by LineName, from second 0; what follows the pipeline comes last.

    A backward's span holds its recompute. Raises ConfigError for a plan that `predict` refuses.
    """
    plan = design.plan
    job = replace(design.job, sequence_length=plan.sequence_length, batch_tokens=plan.batch_tokens)
    table = PlanTable.from_plan(plan)
    stages = stage_seconds(table, model=design.model, cluster=design.cluster, job=job)
    actions = program(
        plan.schedule.kind,
        pipeline=plan.pipeline,
        chunks=plan.schedule.chunks,
        microbatches=plan.schedule.microbatches,
        slices=plan.schedule.slices,
    )
    events = simulate(actions, stages=stages)
    costs = evaluate(table, model=design.model, cluster=design.cluster, job=job)
    played = max(event.start + event.seconds for event in events)
    scale = float(costs.figures["makespan_seconds"][0]) / played
    spans = [span for event in events for span in _spans(event, scale)]
    end = played * scale
    tail = (LineName.PARAMETERS, LineName.GRADIENTS, LineName.OPTIMIZER)
    rest = {name: float(costs.parts[name][0]) for name in tail}
    for rank in range(plan.pipeline):
        clock = end
        for name in tail[1:]:
            if rest[name] > 0.0:
                spans.append(Span(name=name, rank=rank, start=clock, seconds=rest[name]))
                clock += rest[name]
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start)))


def _spans(event: Event, scale: float) -> list[Span]:
    start, seconds = event.start * scale, event.seconds * scale
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
