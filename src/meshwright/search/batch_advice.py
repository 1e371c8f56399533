"""How a plan may read the batch that its job asks for: as many microbatches of as many sequences, and empty rows."""

from __future__ import annotations

from dataclasses import replace

from meshwright.schedule.build import V_SHAPES
from meshwright.search.rules import divisors
from meshwright.search.runtime_rules import rows_may_be_empty
from meshwright.spec.plan import Design, Plan, ScheduleKind


def batch_fix(design: Design) -> str:
    """What of a plan that reads another batch than its job's to choose instead; none of it is refused for the batch."""
    plan, sequences = design.plan, design.job.batch_sequences
    whole = " and 0 empty rows" if plan.empty_rows else ""
    if plan.batch == sequences:
        return "choose 0 empty rows"
    rows, left = divmod(sequences, plan.data)
    if not left:
        cut = _cut(plan, rows)
        return (
            f"choose {cut}{whole}" if cut else f"choose another schedule for {rows:,} sequences of a data rank{whole}"
        )
    others = f"a data parallel size that divides {sequences:,}{whole}"
    padded = _cut(plan, rows + 1) if rows and _may_be_empty(design) else ""
    if not padded:
        return f"choose {others}"
    empty = plan.data - left
    return f"choose {padded} and {empty:,} empty row{'s' * (empty > 1)}, or {others}"


def _cut(plan: Plan, rows: int) -> str:
    """Microbatches, of about as many sequences as now, into which the schedule lets so many rows be cut; "" if none."""
    counts = [count for count in divisors(rows) if _is_closed(plan, count)]
    if not counts:
        return ""
    best = min(counts, key=lambda count: (abs(rows // count - plan.microbatch), count))
    size = rows // best
    of = "" if size == plan.microbatch else f" of {size:,} sequence{'s' * (size > 1)}"
    return f"{best:,} microbatch{'es' * (best > 1)}{of}"


def _is_closed(plan: Plan, count: int) -> bool:
    """Whether the schedule has so many microbatches."""
    kind = plan.schedule.kind
    if kind is ScheduleKind.TABLE:
        return count == plan.schedule.microbatches
    if kind is ScheduleKind.INTERLEAVED and count % plan.pipeline:
        return False
    return kind not in V_SHAPES or count >= 2 * plan.pipeline


def _may_be_empty(design: Design) -> bool:
    return rows_may_be_empty(replace(design, plan=replace(design.plan, empty_rows=1))) is None
