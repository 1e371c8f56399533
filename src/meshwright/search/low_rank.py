"""What low rank training brings a plan: what a run's gate predicts of it, and what a job that asks for none misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.catalog.loss_gaps import low_rank_gap
from meshwright.cost.low_rank import Candidate, Verdict, candidates, given_ranks, verdict
from meshwright.search.advice import WORTH
from meshwright.search.check import check
from meshwright.search.rules import Scope
from meshwright.spec.job import Switch
from meshwright.spec.low_rank import LowRank, Pufferfish, ranks_of, switches_last
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName, Report
from meshwright.spec.units import format_bytes, format_percent, format_seconds

_SENT = (LineName.GRADIENTS, LineName.PARAMETERS, LineName.OUTER)
_SCOPES = frozenset({Scope.PLAN, Scope.RUNTIME})


def foresee_low_rank(design: Design) -> tuple[str, ...]:
    """Of a job with low rank training and a dense model, in a line or two: from which step on matrices become thin, and
    what a step takes before and after, or that a run declines it and why; and what that cost in loss where it was
    measured. () of other jobs, and of models that have become low rank."""
    spec, total = design.job.factoring, design.job.total_steps
    if spec is None or ranks_of(design.model):
        return ()
    found = candidates(design, spec)
    if not found:
        why = "no matrix of this model may have a rank: see low_rank.dense_layers and low_rank.least_dim"
        return (f"low rank training ({spec.kind}) declines: {why}",)
    said = _verdict(design, spec, found)
    if not said.pays:
        return (f"low rank training ({spec.kind}) declines: {said.words}",)
    step = f"step {switches_last(spec, total_steps=total):,} of {total:,}"
    if isinstance(spec, Pufferfish):
        ends = f"after {step}, at {spec.ratio:g} of the full ranks"
    else:
        ends = f"after {step} at the latest, if no matrix needs more than {spec.least_ratio:g} of its full rank"
    return (f"low rank training ({spec.kind}): {ends}, {said.words}", *_loss(design, spec))


def advise_low_rank(design: Design, report: Report) -> tuple[str, ...]:
    """Where ranks that wait for what they send would save a fifth by thin matrices, of which the job asks for none."""
    spec = Pufferfish()
    if (
        design.job.factoring is not None
        or design.job.compile is not Switch.OFF
        or ranks_of(design.model)
        or report.share(*_SENT) < WORTH
    ):
        return ()
    asked = replace(design, job=replace(design.job, low_rank=spec))
    found = candidates(asked, spec)
    if not found or switches_last(spec, total_steps=asked.job.total_steps) >= asked.job.total_steps:
        return ()
    said = _verdict(asked, spec, found)
    if not said.pays or said.saved <= WORTH or check(said.design, scopes=_SCOPES):
        return ()
    sent, less = (format_bytes(each.collective_bytes) for each in (said.dense, said.factored))
    took = f"{format_seconds(said.factored.seconds)} a step, not {format_seconds(said.dense.seconds)}"
    return (
        f"low rank training at {spec.ratio:g} of the full ranks would take {format_percent(said.saved)} less time "
        f"after its switch ({took}; {less} in collectives, not {sent}); the job asks for none, and would with --set "
        f"'job.low_rank.kind=\"{spec.kind}\"'; numerics change, and what that costs in quality has to be measured",
        *_loss(design, spec),
    )


def _verdict(design: Design, spec: LowRank, found: Sequence[Candidate]) -> Verdict:
    """The ranks that are given, or the least that may be found, as a run asks when it starts."""
    ratio = spec.ratio if isinstance(spec, Pufferfish) else spec.least_ratio
    return verdict(design, found, given_ranks(found, ratio=ratio), gain=spec.gain)


def _loss(design: Design, spec: LowRank) -> tuple[str, ...]:
    ratio = spec.ratio if isinstance(spec, Pufferfish) else spec.least_ratio
    gap = low_rank_gap(ratio, parameters=design.model.parameters)
    return (f"loss above that of whole matrices after as many tokens, where it was measured: {gap.words}",)
