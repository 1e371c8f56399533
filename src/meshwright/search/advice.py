"""Whether what the job does not ask for, another way of meeting, a wider precision or a vocabulary filled up, would
make its plan faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.catalog import with_vocab
from meshwright.cost.predict import predict, predict_all
from meshwright.cost.ways import WayOfMeeting, ways_of_meeting
from meshwright.search.explain import changes
from meshwright.search.job_rules import allowed_meetings, allowed_precisions
from meshwright.search.refine import entry_order
from meshwright.search.trainer import Trainer
from meshwright.search.used import used_of
from meshwright.search.worth import TRIED, worth_of_kind
from meshwright.spec.cluster import DeviceSpec, Precision
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import AxisName, Design, Recompute, Schedule
from meshwright.spec.report import LineName, Report
from meshwright.spec.synchronize import SyncKind
from meshwright.spec.units import counted, format_percent, format_seconds, format_times, format_tokens

WORTH = 0.2  # of a step that is to be saved before it is spoken of: learners cost quality, a wider precision memory
FREE = 0.02  # of a step, where what saves it costs a few rows of a table
_IDLE = 0.25  # of a step, that ranks of a pipeline wait
_FULL_ROWS = 64  # of a tensor rank's vocabulary: 128 bytes of logits in sixteen bits, and no less of the narrowest tile
_SURER = 0.01  # of a chance to fit, by which two plans are not as sure
_ALIKE = 10  # plans that are ranked first and told without masks
_MET = (LineName.GRADIENTS, LineName.PARAMETERS)


def advise(design: Design, report: Report) -> tuple[str, ...]:
    """One line where all ranks meet in every step for want of anything else, and learners would save a fifth."""
    if design.plan.gradients.kind.has_learners or report.share(*_MET) < WORTH:
        return ()
    return advice(design, ways_of_meeting(design))


def advice(design: Design, ways: Sequence[WayOfMeeting]) -> tuple[str, ...]:
    """As `advise`, of what every way of meeting would cost, the plan as it is first: of learners whose loss was
    measured, those that are soonest at the same loss."""
    kinds = allowed_meetings(design.job)
    own, others = ways[:1], [way for way in ways if way.fits and way.kind in TRIED and way.every]
    learners = {kind.value for kind in SyncKind if kind.has_learners}
    if not own or own[0].every or learners & set(kinds) or not others:
        return ()
    parameters = float(design.model.parameters)
    best = min(others, key=lambda way: way.step_seconds * worth_of_kind(way.kind, parameters=parameters))
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


def advise_apart(report: Report, other: tuple[Design, Report], sites: int) -> tuple[str, ...]:
    """One line where learners, which the job does not allow, would save a fifth of the best plan over several sites;
    `other` is the best with them, which may be divided otherwise."""
    design, found = other
    gradients, saved = design.plan.gradients, 1.0 - found.step_seconds / report.step_seconds
    if not gradients.kind.has_learners or saved <= WORTH:
        return ()
    took = f"{format_seconds(found.step_seconds)} a step, not {format_seconds(report.step_seconds)}"
    allowed = f"--set 'job.synchronize.kinds=[\"{gradients.kind.value}\"]'"
    return (
        f"between {sites} sites {design.plan.size(AxisName.REPLICATE)} {gradients.words} would take "
        f"{format_percent(saved)} less time ({took}); the job allows none, and would with {allowed}; numerics change, "
        "and what that costs in quality has to be measured",
    )


def advise_masks(ranked: Sequence[tuple[Design, Report]]) -> tuple[str, ...]:
    """One line where the best plan, or one that is ranked behind it, would be shorter than the best if documents of one
    sequence saw each other: kernels that take a mask work out all scores, those over context ranks skip most. Of these
    plans it tells the one that would be ranked first then."""
    chosen, report = ranked[0]
    if not chosen.job.data.document_mask:
        return ()
    whole = [design for design, _ in ranked[:_ALIKE] if design is chosen or design.plan.context == 1]
    seen = [replace(each, job=replace(each.job, data=replace(each.job.data, document_mask=False))) for each in whole]
    found = [entry for entry in zip(seen, predict_all(seen), strict=True) if entry[1].fits]
    if not found:
        return ()
    made, best = min(found, key=lambda entry: entry_order(entry, chosen.job.objective))
    saved = 1.0 - best.step_seconds / report.step_seconds
    if saved <= FREE:
        return ()
    return (
        "documents that share a sequence do not see each other (data.document_mask), for which kernels work out all "
        f"scores and mask them: if they did, this plan{changes(chosen, made)} would take {format_percent(saved)} less "
        f"time, {format_seconds(best.step_seconds)} a step{_chances(report, best)}, and others may take still less "
        "(--set data.document_mask=false)",
    )


def _chances(report: Report, other: Report) -> str:
    """`, and fit with 58.8 %, not 97.2 %`, where the two are not as sure to fit."""
    ours, theirs = report.fit_probability, other.fit_probability
    if ours is None or theirs is None or abs(theirs - ours) < _SURER:
        return ""
    return f", and fit with {format_percent(theirs)}, not {format_percent(ours)}"


def advise_trainer(asked: JobSpec, trainer: Trainer | None) -> Iterator[str]:
    """Where a plan is for another trainer: that it is chosen without the document mask that is `asked`."""
    if trainer is not None and asked.data.document_mask and not trainer.trained(asked).data.document_mask:
        yield (
            f"documents that share a sequence see each other in {trainer.name} as it is exported to: this design has "
            "data.document_mask = false"
        )


def advise_otherwise(design: Design, report: Report) -> tuple[str, ...]:
    """Lines where another precision, batch or vocabulary would train faster."""
    return (*_wider(design, report), *_batch(design, report), *_filled(design, report))


def _wider(design: Design, report: Report) -> tuple[str, ...]:
    """One line where the same plan in fp32, which the job does not allow, would be faster by a fifth and fit.

    So it is on processors without arithmetic of sixteen bits, which emulate it.
    """
    fp32 = Precision.FP32
    groups = [group for stage in design.plan.stages for group in stage.groups]
    used = used_of(design.plan, design.cluster)
    peaks = [group.device.peak_flops for group in used.groups]
    narrow = {group.precision for group in groups}
    if fp32 in allowed_precisions(design.job, used) or not all(
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


def _batch(design: Design, report: Report) -> tuple[str, ...]:
    """One line where pipeline ranks idle a quarter of the step or more because the batch has too few sequences for the
    devices: why, and what the same plan would do with twice the batch."""
    plan, schedule, job = design.plan, design.plan.schedule, design.job
    idle = report.share(LineName.BUBBLE)
    if plan.pipeline == 1 or plan.microbatch > 1 or idle < _IDLE or job.batch_sequences >= plan.world_size:
        return ()
    if schedule.table or schedule.paths:
        return ()
    sequences, devices = counted(job.batch_sequences, "sequence"), counted(plan.world_size, "device")
    head = (
        f"pipeline ranks idle {format_percent(idle)} of the step: {sequences} a step for {devices} is one for every "
        f"{plan.world_size // job.batch_sequences:,} of them"
    )
    cures = []
    if (more := next((found for found in predict_all(_twice(design)) if found.fits), None)) is not None:
        gain = format_times(2.0 * report.step_seconds / more.step_seconds)
        tokens = format_tokens(2 * job.batch_tokens)
        cures.append(f"twice the batch would train {gain} the tokens a second (--set batch_tokens={tokens})")
    if job.constraints.devices == "all":
        cures.append("fewer devices would idle less (--set constraints.devices=any lets the search leave some out)")
    return (f"{head}; {', and '.join(cures)}",) if cures else ()


def _twice(design: Design) -> list[Design]:
    """The design with twice the batch as twice the microbatches: as it is, and with all computed again under 1f1b."""
    plan, job = design.plan, replace(design.job, batch_tokens=2 * design.job.batch_tokens)
    count = 2 * plan.schedule.microbatches
    lean = Schedule(microbatches=count) if plan.schedule.chunks == 1 else replace(plan.schedule, microbatches=count)
    stages = tuple(
        replace(stage, groups=tuple(replace(group, recompute=Recompute.FULL) for group in stage.groups))
        for stage in plan.stages
    )
    as_it_is = replace(plan, schedule=replace(plan.schedule, microbatches=count))
    return [replace(design, job=job, plan=each) for each in (as_it_is, replace(plan, schedule=lean, stages=stages))]


def _filled(design: Design, report: Report) -> tuple[str, ...]:
    """One line where a vocabulary with some more rows, of which no token is, would save some of the step.

    Kernels load rows of logits' gradients that are no multiples of 16 bytes by narrower instructions.
    """
    rows = _FULL_ROWS * design.plan.stages[-1].groups[-1].tensor
    vocab = design.model.vocab
    filled = -(-vocab // rows) * rows
    if filled == vocab or not any(_cares(group.device) for group in design.cluster.groups):
        return ()
    padded = predict(replace(design, model=with_vocab(design.model, vocab=filled)))
    saved = 1.0 - padded.step_seconds / report.step_seconds
    if saved < FREE or not padded.fits:
        return ()
    return (
        f"a vocabulary of {filled:,} rows, {filled - vocab:,} of them unused, would take {format_percent(saved)} less "
        f"time ({format_seconds(padded.step_seconds)} a step, not {format_seconds(report.step_seconds)}): rows of "
        f"{vocab:,} logits are no multiples of 16 bytes",
    )


def _cares(device: DeviceSpec) -> bool:
    return device.tiles is not None and min(device.tiles.misaligned) < 1.0
