"""Lost: what of a job no flag of a trainer says, told in the same way for all of them."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.export.compare import Line, Verdict
from meshwright.spec.job import ElasticBackend, Interval, NonFinite, Spike
from meshwright.spec.model import Mixture
from meshwright.spec.plan import Design

Words = tuple[str, str, str]


def lost_lines(words: Iterable[Words]) -> tuple[Line, ...]:
    """A line for each name, word of the plan and word of the trainer."""
    return tuple(Line(name=name, plan=plan, peer=peer, verdict=Verdict.LOST) for name, plan, peer in words)


def lost_start(design: Design, *, fix: str) -> list[Words]:
    """The weights that the job begins with."""
    return [("first weights", design.job.start, f"drawn anew; {fix}")] if design.job.start else []


def lost_checkpoints(design: Design, *, folder: str, kept: str, written: str, fix: str) -> list[Words]:
    """Where checkpoints lie, which of them stay and how they are `written`, or that there are none: `fix` says what
    would save. What is as the job has it is ""."""
    spec = design.job.checkpoint
    if spec.every_steps and spec.interval is Interval.STEPS:
        stay = f"{spec.keep or 'all'}" + (
            f", and every {spec.keep_every_steps:,} steps" if spec.keep_every_steps else ""
        )
        asked = "while training goes on" if spec.asynchronous else "while training waits"
        return [
            ("checkpoint folder", "the run directory", f"{folder}, which all nodes have to see"),
            *([("checkpoints kept", stay, kept)] if kept and kept != stay else []),
            *([("checkpoints written", asked, written)] if written else []),
        ]
    when = "as often as wastes least" if spec.interval is Interval.GOODPUT else "at the end and on a signal"
    return [("checkpoints", when, f"none; {fix}")]


def lost_watch(design: Design, *, non_finite: str, waits: str, verify: str, trackers: str) -> list[Words]:
    """What watches over a run here: each as the trainer does it, which has no word for spikes and lost ranks."""
    job = design.job
    policy, spike, elastic = job.non_finite.policy, job.spike, job.elastic
    saved = "stop, the last good state saved"
    again = saved if policy is NonFinite.STOP else f"{policy}, up to {job.non_finite.most_in_a_row} in a row"
    lines = [("non-finite steps", again, non_finite), ("wait for a rank", f"{job.peer_timeout_seconds:g} s", waits)]
    if spike.policy is not Spike.IGNORE:
        told = f"{spike.policy} above {spike.deviations:g} deviations of {spike.window} steps"
        told += "" if spike.policy is Spike.STOP else f", up to {spike.most_in_a_row} in a row"
        lines.append(("spikes", told, "taken as any other step"))
    if elastic.on:
        words = f"{elastic.min_ranks} or more go on, {elastic.replacements} started again, by {elastic.backend}"
        words += f" at {elastic.lighthouse}" if elastic.lighthouse else ""
        words += f", copies every {elastic.copies_every} steps" if elastic.backend is ElasticBackend.OWN else ""
        lines.append(("lost ranks", words, "a lost rank ends the run"))
    if job.verify.every_steps:
        lines.append(("ranks compared", f"every {job.verify.every_steps:,} steps, then {job.verify.policy}", verify))
    return lines + ([("trackers", ", ".join(job.trackers), trackers)] if job.trackers else [])


def lost_balance(design: Design, *, peer: str) -> list[Words]:
    """Experts that the model leaves to themselves: configs of Hugging Face name a loss that its models add only where
    output_router_logits is set, so that it is read as none."""
    routed = [layer.transform.routing for layer in design.model.layers if isinstance(layer.transform, Mixture)]
    alone = any(not routing.bias_rate and not routing.balance_loss for routing in routed)
    return [("balance of experts", "none: routing has no balance_loss and no bias_rate", peer)] if alone else []


def evaluation_words(design: Design) -> str:
    """`every 500 steps of 65,536 tokens`."""
    spec = design.job.evaluation
    when = f"every {spec.every_steps:,} steps" if spec.every_steps else "at the end"
    return f"{when}, of {spec.tokens:,} tokens"


def saves_every(design: Design) -> int:
    """The steps between checkpoints where the job says them; 0 where it does not."""
    spec = design.job.checkpoint
    return spec.every_steps if spec.interval is Interval.STEPS else 0
