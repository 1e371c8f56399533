"""Ranked plans as rows: what the layout is, what it leaves open, and all that makes two of them differ."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.report.settings import Setting, by_blocks, plan_settings
from meshwright.spec.exchange import exchange_words
from meshwright.spec.group_words import sharding_words
from meshwright.spec.plan import Plan
from meshwright.spec.units import format_percent


def layout_words(plan: Plan) -> str:
    """`pipeline 16 x shard 128 x tensor 8`: axes from the outermost inwards, and said so in another order than the
    usual one."""
    parts = [f"{axis.name.value} {axis.size}" for axis in plan.axes if axis.size > 1]
    return (" x ".join(parts) or "one device") + ("" if plan.has_usual_order else ", from the outermost axis inwards")


def setting_words(plan: Plan) -> str:
    """`zero1, seq. parallel, ring, full recompute in 20 blocks, interleaved 3, 32 x 1`: what the layout leaves open,
    microbatches last."""
    group, schedule = plan.first_group, plan.schedule
    words = by_blocks(plan, sharding_words, "")
    words += ["seq. parallel"] if group.sequence_parallel else []
    if plan.context > 1:
        words.append(exchange_words(plan.exchange, plan.context))
    words += by_blocks(plan, lambda each: each.recompute.value, "recompute")
    words += by_blocks(plan, lambda each: each.offload.value, "offloaded")
    words += [plan.gradients.words] if plan.gradients.is_special else []
    words += [f"experts {plan.experts.expert} x {plan.experts.tensor}"] if plan.experts else []
    if plan.pipeline > 1 or schedule.chunks > 1 or schedule.slices > 1:
        chunks = f" {schedule.chunks}" if schedule.chunks > 1 else ""
        slices = f" of {schedule.slices} slices" if schedule.slices > 1 else ""
        paths = f" leaving out {format_percent(plan.skipped_share)}" if schedule.paths else ""
        words.append(f"{schedule.kind.value}{chunks}{slices}{paths}")
    words.append(f"{schedule.microbatches} x {plan.microbatch}")
    return ", ".join(words)


def told_apart(plans: Sequence[Plan], texts: Sequence[str]) -> tuple[str, ...]:
    """`texts`, one a plan, with what makes those differ that would read alike; plans that are equal stay alike."""
    found = list(texts)
    for text in dict.fromkeys(texts):
        alike = [index for index, other in enumerate(texts) if other == text]
        digests = {plans[index].digest() for index in alike}
        if len(digests) == 1:
            continue
        settings = [dict(_every_setting(plans[index])) for index in alike]
        names = [name for name in settings[0] if len({each[name] for each in settings}) > 1]
        for index, each in zip(alike, settings, strict=True):
            found[index] = ", ".join([text, *(f"{name} {each[name]}" for name in names)])
        if len({found[index] for index in alike}) < len(digests):
            for index in alike:
                found[index] = f"{found[index]}, plan {plans[index].digest()}"
    return tuple(found)


def row_words(plans: Sequence[Plan]) -> tuple[str, ...]:
    """The two lines of every plan, told apart; precisions where they differ."""
    lines = [f"{layout_words(plan)}\n{setting_words(plan)}" for plan in plans]
    precisions = [plan.first_group.precision.value for plan in plans]
    if len(set(precisions)) > 1:
        lines = [f"{line}, {precision}" for line, precision in zip(lines, precisions, strict=True)]
    return told_apart(plans, lines)


def plan_names(plans: Sequence[Plan]) -> tuple[str, ...]:
    """The name of every plan in one line, told apart; without the number of devices where all have as many."""
    names = [plan.describe() for plan in plans]
    counts = {plan.world_size for plan in plans}
    shown = [name.partition(": ")[2] or name for name in names] if len(counts) == 1 < len(plans) else names
    return told_apart(plans, shown)


def _every_setting(plan: Plan) -> tuple[Setting, ...]:
    """What `plan_settings` says, and the layers of every stage."""
    counts = " ".join(str(stage.stop - stage.start) for stage in plan.stages)
    return (*plan_settings(plan, has_experts=plan.experts is not None), ("stages of", counts))
