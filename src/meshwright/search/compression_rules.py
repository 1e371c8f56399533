"""Rules of compressed gradients: numbers that mean something, ranks that meet, and layouts in which they do so."""

from __future__ import annotations

from meshwright.search.rules import Rule, Scope
from meshwright.spec.cluster import Precision
from meshwright.spec.compression import compression_problems
from meshwright.spec.errors import Problem
from meshwright.spec.optimizer import Master
from meshwright.spec.plan import Design, Offload, Sharding, TensorGrid

_WHERE = "plan.gradients.compression"
SOUND = "compression-is-sound"
_WHOLE = (Precision.FP32, Precision.FP64)


def compression_is_sound(design: Design) -> Problem | None:
    """Numbers of a compression are in their ranges."""
    compression = design.plan.gradients.compression
    return None if compression is None else next(compression_problems(compression, where=_WHERE), None)


def compression_has_peers(design: Design) -> Problem | None:
    """Ranks compress what they send each other in every step, and in one way."""
    plan, compression = design.plan, design.plan.gradients.compression
    if compression is None:
        return None
    if plan.gradients.kind.has_learners:
        what = (
            f"learners that meet as {plan.gradients.kind.value} send no gradients, and {compression.kind} is of those"
        )
        return Problem(where=_WHERE, what=what, fix="leave it out, and choose plan.gradients.rounds.precision")
    if plan.replicate * plan.shard * plan.context == 1:
        what = f"{compression.kind} of gradients that no other rank adds to"
        return Problem(where=_WHERE, what=what, fix="leave it out, or give the plan a replicate axis")
    if plan.gradients.precision not in _WHOLE:
        what = f"{compression.kind} of gradients that meet in {plan.gradients.precision.value}"
        return Problem(where="plan.gradients.precision", what=what, fix="choose fp32, or leave the compression out")
    return None


def compression_laid(design: Design) -> Problem | None:
    """What is left of a gradient is owed to the ranks of one axis, who hold the same parameters or own the same shards
    of them."""
    plan, compression = design.plan, design.plan.gradients.compression
    if compression is None:
        return None
    sharding = plan.first_group.sharding
    sharded = sharding is not Sharding.NONE and plan.shard * plan.context > 1
    axes = sum(size > 1 for size in (plan.replicate, plan.shard, plan.context))
    meets = any(plan.repeats(group) > 1 for group in plan.groups)
    offloaded = any(group.offload is Offload.PARAMETERS for group in plan.groups)
    against = {
        f"that {sharding.value} shards among all ranks": sharded and not meets,
        "over two axes": not sharded and axes > 1,
        "that lie in the host's memory": sharded and offloaded,
        "with experts on a grid of their own": plan.experts is not None,
        f"on a {plan.tensor_grid.value} of tensor ranks": plan.tensor > 1 and plan.tensor_grid is not TensorGrid.LINE,
        "of parameters kept in bf16": design.job.master is not Master.FP32,
    }
    for how, refused in against.items():
        if refused:
            what = f"{compression.kind} of gradients {how} is not known here"
            fix = "leave it out, or choose a replicate axis alone or beside what is sharded"
            return Problem(where=_WHERE, what=what, fix=fix)
    return None


COMPRESSION_RULES: tuple[Rule, ...] = (
    Rule(name=SOUND, scope=Scope.PLAN, check=compression_is_sound),
    Rule(name="compression-has-peers", scope=Scope.PLAN, check=compression_has_peers),
    Rule(name="compression-is-laid", scope=Scope.PLAN, check=compression_laid),
)
