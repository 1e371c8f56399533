"""Whether another way of meeting, which the job does not allow, would make its plan much faster."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cost.ways import WayOfMeeting, ways_of_meeting
from meshwright.search.job_rules import allowed_meetings
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName, Report
from meshwright.spec.synchronize import SyncKind
from meshwright.spec.units import format_percent, format_seconds

WORTH = 0.2  # of a step that learners are to save before they are spoken of: they cost quality
_MET = (LineName.GRADIENTS, LineName.PARAMETERS)


def advise(design: Design, report: Report) -> tuple[str, ...]:
    """One line where all ranks meet in every step for want of anything else, and learners would save a fifth."""
    if design.plan.gradients.kind.has_learners or report.share(*_MET) < WORTH:
        return ()
    return advice(design, ways_of_meeting(design))


def advice(design: Design, ways: Sequence[WayOfMeeting]) -> tuple[str, ...]:
    """As `advise`, of what every way of meeting would cost, the plan as it is first."""
    kinds = allowed_meetings(design.job)
    own, others = ways[:1], [way for way in ways if way.fits and way.kind not in kinds and way.every]
    learners = {kind.value for kind in SyncKind if kind.has_learners}
    if not own or own[0].every or learners & set(kinds) or not others:
        return ()
    best = min(others, key=lambda way: way.step_seconds)
    saved = 1.0 - best.step_seconds / own[0].step_seconds
    if saved <= WORTH:
        return ()
    took = f"{format_seconds(best.step_seconds)} a step, not {format_seconds(own[0].step_seconds)}"
    allowed = f"--set 'job.synchronize.kinds=[\"{best.kind.value}\"]'"
    return (
        f"{best.learners} learners that meet as {best.words} would take {format_percent(saved)} less time ({took}); "
        f"the job allows none, and would with {allowed}; numerics change, and what that costs in quality has to be "
        "measured",
    )
