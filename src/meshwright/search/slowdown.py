"""How much longer than the fastest plan's a step may take where memory or cost is least, and what more would save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshwright.search.candidate import TIE, expected_seconds
from meshwright.search.parts import Search
from meshwright.search.refine import Entry, entry_value
from meshwright.spec.job import Devices, JobSpec, Objective
from meshwright.spec.units import format_bytes, format_percent, format_seconds, format_times


def is_held_to_time(job: JobSpec) -> bool:
    """Whether another plan than the fastest may have least of what `job` minimises, and is held to its time."""
    costs = job.objective is Objective.COST and job.constraints.devices == Devices.ANY
    return (costs or job.objective is Objective.MEMORY) and job.constraints.slowdown < math.inf


def slowest_seconds(fastest: Entry, job: JobSpec) -> float:
    """What a step of `job`, as it is expected, may take at the most where that of the `fastest` plan is known."""
    return job.constraints.slowdown * expected_seconds(*fastest)


def advise_slowdown(chosen: Entry, fastest: Entry | None, *, best: Search) -> Iterator[str]:
    """What the `fastest` plan takes to whose time `chosen` is held, and what less time would save of what is minimised;
    nothing where there is none. `best` searches."""
    if fastest is None or not entry_value(chosen, chosen[0].job.objective) < math.inf:
        return
    (made, report), job = chosen, chosen[0].job
    if made.plan.digest() != fastest[0].plan.digest():
        times = format_times(report.step_seconds / fastest[1].step_seconds)
        yield f"the fastest plan takes {_told(fastest)}; this one takes {times} as long"
    anything = replace(job, constraints=replace(job.constraints, slowdown=math.inf))
    value = entry_value(chosen, job.objective)
    other = best(made.model, made.cluster, anything, below=value)
    if other is None or (saved := 1.0 - entry_value(other, job.objective) / value) < TIE:
        return
    slower = math.ceil(expected_seconds(*other) / expected_seconds(*fastest))
    much = f"{format_percent(saved)} less {'memory' if job.objective is Objective.MEMORY else 'money'}"
    yield (
        f"{much} would take {format_times(other[1].step_seconds / report.step_seconds)} the time: {_told(other)}; "
        f"constraints.slowdown is {job.constraints.slowdown:g}, and with {slower} that plan is chosen"
    )


def _told(entry: Entry) -> str:
    made, report = entry
    return (
        f"{format_seconds(report.step_seconds)} a step and {format_bytes(report.peak_bytes)} ({made.plan.describe()})"
    )
