"""What a plan sets, one word a setting: the same settings in the same order for every plan, so that two compare."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.search.settings import devices_words
from meshwright.spec.group_words import sharding_words
from meshwright.spec.plan import BlockGroup, Design, Dispatch, Plan, TensorGrid

Setting = tuple[str, str]
_NONE = "none"


def settings(design: Design) -> tuple[Setting, ...]:
    """(name, value) of everything that plans of one job differ in; experts where the model has some."""
    model = design.model
    return plan_settings(design.plan, has_experts=model.active_parameters < model.parameters)


def plan_settings(plan: Plan, *, has_experts: bool) -> tuple[Setting, ...]:
    """As `settings`, of a plan alone."""
    group, schedule = plan.first_group, plan.schedule
    experts = (("experts", _experts(plan)),) if has_experts else ()
    return (
        ("devices", f"{plan.world_size:,}"),
        (
            "tensor",
            str(plan.tensor) if plan.tensor_grid is TensorGrid.LINE else f"{plan.tensor}, {plan.tensor_grid.value}",
        ),
        ("sequence parallel", "yes" if group.sequence_parallel else "no"),
        ("context", _context(plan)),
        *experts,
        ("pipeline", str(plan.pipeline)),
        ("schedule", schedule.kind.value if plan.pipeline > 1 else _NONE),
        ("chunks", str(schedule.chunks)),
        ("slices", str(schedule.slices)),
        ("shard", str(plan.shard)),
        ("sharding", _by_blocks(plan, sharding_words)),
        ("replicate", str(plan.replicate)),
        ("microbatch", _sequences(plan.microbatch)),
        ("microbatches", f"{schedule.microbatches:,}"),
        ("recompute", _by_blocks(plan, lambda each: each.recompute.value)),
        ("offload", _by_blocks(plan, lambda each: each.offload.value)),
        ("precision", group.precision.value),
        ("trained", _by_blocks(plan, lambda each: each.training.value)),
        ("gradients meet in", _gradients(plan)),
        ("replicas meet", _meeting(plan)),
        ("batch", _sequences(plan.sequences)),
        ("axes, outermost first", ", ".join(axis.name.value for axis in plan.axes if axis.size > 1) or _NONE),
        ("devices of the ranks", devices_words(plan)),
        ("blocks a stage", _blocks(plan)),
    )


def _gradients(plan: Plan) -> str:
    """`fp32`, or `fp32 by powersgd of rank 4`."""
    how = plan.gradients.compression
    return plan.gradients.precision.value + ("" if how is None else f" by {how.words}")


def _meeting(plan: Plan) -> str:
    """`in every step`, or `as eager every 12 steps, in int8`."""
    gradients = plan.gradients
    if plan.learners == 1:
        return "in every step"
    steps = f"every {gradients.rounds.every} steps" if gradients.rounds.every > 1 else "every step"
    return f"as {gradients.kind.value} {steps}, in {gradients.rounds.precision.value}"


def _context(plan: Plan) -> str:
    if plan.context == 1:
        return "1"
    inner, outer = plan.exchange.inner, plan.context // plan.exchange.inner
    heads = "all-to-all" if outer == 1 else f"all-to-all {inner}"
    keys = plan.exchange.kind.value if outer > 1 else ""
    layout = plan.exchange.layout.value
    return ", ".join(part for part in (str(plan.context), heads if inner > 1 else "", keys, layout) if part)


def _by_blocks(plan: Plan, value: Callable[[BlockGroup], str]) -> str:
    """The setting of all blocks, or `none in 22 blocks, full in 10 blocks` where they differ."""
    counts = _counts(plan, value)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} in {count} blocks" for name, count in counts.items())


def by_blocks(plan: Plan, value: Callable[[BlockGroup], str], noun: str) -> list[str]:
    """`full recompute`, or where blocks differ `full recompute in 12 blocks`, one a kind; nothing where none is."""
    counts = _counts(plan, value)
    alike = len(counts) == 1
    kinds = sorted((name, count) for name, count in counts.items() if name != _NONE)
    return [f"{name} {noun}".rstrip() + ("" if alike else f" in {count} blocks") for name, count in kinds]


def _counts(plan: Plan, value: Callable[[BlockGroup], str]) -> dict[str, int]:
    """Blocks by their setting."""
    counts: dict[str, int] = {}
    for stage in plan.stages:
        for group in stage.groups:
            counts[value(group)] = counts.get(value(group), 0) + group.stop - group.start
    return counts


def _experts(plan: Plan) -> str:
    if plan.experts is None:
        return "over tensor"
    gathered = ", tokens gathered" if plan.experts.dispatch is Dispatch.ALL_GATHER else ""
    return f"{plan.experts.expert} x tensor {plan.experts.tensor}{gathered}"


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count:,} sequences"


def _blocks(plan: Plan) -> str:
    counts = [stage.stop - stage.start for stage in plan.stages]
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"
