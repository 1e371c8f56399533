"""What a plan sets, one word a setting: the same settings in the same order for every plan, so that two compare."""

from __future__ import annotations

from meshwright.spec.plan import Design, Offload, Plan, Recompute, Sharding

Setting = tuple[str, str]
_NONE = "none"


def settings(design: Design) -> tuple[Setting, ...]:
    """(name, value) of everything that plans of one job differ in; experts where the model has some."""
    plan, model = design.plan, design.model
    group, schedule = plan.first_group, plan.schedule
    experts = (("experts", _experts(plan)),) if model.active_parameters < model.parameters else ()
    return (
        ("devices", f"{plan.world_size:,}"),
        ("tensor", str(plan.tensor)),
        ("sequence parallel", "yes" if group.sequence_parallel else "no"),
        ("context", _context(plan)),
        *experts,
        ("pipeline", str(plan.pipeline)),
        ("schedule", schedule.kind.value if plan.pipeline > 1 else _NONE),
        ("chunks", str(schedule.chunks)),
        ("slices", str(schedule.slices)),
        ("shard", str(plan.shard)),
        ("sharding", group.sharding.value if group.sharding is not Sharding.NONE else _NONE),
        ("replicate", str(plan.replicate)),
        ("microbatch", _sequences(plan.microbatch)),
        ("microbatches", f"{schedule.microbatches:,}"),
        ("recompute", group.recompute.value if group.recompute is not Recompute.NONE else _NONE),
        ("offload", group.offload.value if group.offload is not Offload.NONE else _NONE),
        ("precision", group.precision.value),
        ("gradients meet in", plan.gradients.precision.value),
        ("batch", _sequences(plan.batch)),
        ("axes, outermost first", " ".join(axis.name.value for axis in plan.axes if axis.size > 1) or _NONE),
        ("blocks a stage", _blocks(plan)),
    )


def _context(plan: Plan) -> str:
    if plan.context == 1:
        return "1"
    return f"{plan.context}, {plan.exchange.kind.value}, all-to-all {plan.exchange.inner}"


def _experts(plan: Plan) -> str:
    if plan.experts is None:
        return "over tensor"
    return f"{plan.experts.expert} x tensor {plan.experts.tensor}"


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count:,} sequences"


def _blocks(plan: Plan) -> str:
    counts = [stage.stop - stage.start for stage in plan.stages]
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"
