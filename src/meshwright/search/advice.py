"""Whether what the job does not allow, another way of meeting or a wider precision, would make its plan much faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.cost.predict import predict
from meshwright.cost.ways import WayOfMeeting, ways_of_meeting
from meshwright.search.job_rules import allowed_meetings, allowed_precisions
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName, Report
from meshwright.spec.synchronize import SyncKind
from meshwright.spec.units import format_percent, format_seconds

WORTH = 0.2  # of a step that is to be saved before it is spoken of: learners cost quality, a wider precision memory
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


def advise_wider(design: Design, report: Report) -> tuple[str, ...]:
    """One line where the same plan in fp32, which the job does not allow, would be faster by a fifth and fit.

    So it is on processors without arithmetic of sixteen bits, which emulate it.
    """
    fp32 = Precision.FP32
    groups = [group for stage in design.plan.stages for group in stage.groups]
    peaks = [group.device.peak_flops for group in design.cluster.groups]
    narrow = {group.precision for group in groups}
    if fp32 in allowed_precisions(design.job, design.cluster) or not all(
        peak.get(fp32, 0.0) > peak.get(precision, 0.0) for peak in peaks for precision in narrow
    ):
        return ()
    stages = tuple(
        replace(stage, groups=tuple(replace(group, precision=fp32) for group in stage.groups))
        for stage in design.plan.stages
    )
    wide = predict(replace(design, plan=replace(design.plan, stages=stages)))
    saved = 1.0 - wide.step_seconds / report.step_seconds
    if saved <= WORTH or not wide.fits:
        return ()
    took = f"{format_seconds(wide.step_seconds)} a step, not {format_seconds(report.step_seconds)}"
    names = ", ".join(sorted(precision.value for precision in narrow))
    return (
        f"in fp32 this plan would take {format_percent(saved)} less time ({took}): the devices are slower in {names}, "
        "which the job asks for; --set 'job.other_precisions=[\"fp32\"]' lets the search choose",
    )
