"""Rules of the runtime: designs that can be predicted and that it cannot train yet. Each is lifted by a feature."""

from __future__ import annotations

from meshwright.search.degree_rules import groups_of
from meshwright.search.rules import Rule, Scope
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import Problem
from meshwright.spec.model import Attention, LatentAttention, Mixture, Recurrence
from meshwright.spec.plan import Design, Offload, ScheduleKind

TRAINED_SCHEDULES = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)
TRAINED_PRECISIONS = (Precision.BF16, Precision.FP32, Precision.TF32, Precision.FP64)


def precision_trained(design: Design) -> Problem | None:
    """The runtime multiplies in the plan's precision."""
    for where, group in groups_of(design.plan):
        if group.precision not in TRAINED_PRECISIONS:
            return Problem(
                where=f"{where}.precision",
                what=f"{group.precision.value} can be predicted and not trained yet",
                fix=f"choose {', '.join(precision.value for precision in TRAINED_PRECISIONS)}",
            )
    return None


def layers_built(design: Design) -> Problem | None:
    """The runtime has a module for every layer of the model."""
    for index, layer in enumerate(design.model.layers):
        if layer.tokens != 1.0:
            what = "a layer that sees other tokens than the job's sequences can be predicted and not trained yet"
            return Problem(where=f"model.layers[{index}].tokens", what=what, fix="choose layers of one sequence")
        if isinstance(layer.mixer, Recurrence):
            what = "a recurrence can be predicted and not trained yet"
            return Problem(where=f"model.layers[{index}].mixer", what=what, fix="choose a model of attention layers")
        if isinstance(layer.mixer, Attention) and not layer.mixer.causal:
            what = "attention that sees later tokens can be predicted and not trained yet"
            return Problem(where=f"model.layers[{index}].mixer.causal", what=what, fix="choose causal attention")
        if isinstance(layer.mixer, LatentAttention) and layer.mixer.indexer:
            what = "sparse attention with an indexer can be predicted and not trained yet"
            return Problem(where=f"model.layers[{index}].mixer.indexer", what=what, fix="choose dense attention")
        extra = layer.extra_parameters + (
            layer.transform.extra_parameters if isinstance(layer.transform, Mixture) else 0
        )
        if extra:
            what = f"a layer with {extra:,} parameters that no matrix product uses can be predicted and not trained yet"
            return Problem(where=f"model.layers[{index}].extra_parameters", what=what, fix="choose another model")
    return None


def towers_built(design: Design) -> Problem | None:
    """The runtime trains decoders of text alone."""
    if not design.model.towers:
        return None
    names = ", ".join(tower.name for tower in design.model.towers)
    what = f"a model with an encoder beside the decoder ({names}) can be predicted and not trained yet"
    return Problem(where="model.towers", what=what, fix="choose a model of text alone")


def axes_built(design: Design) -> Problem | None:
    """The runtime lays every axis of the plan."""
    plan = design.plan
    if plan.context > 1:
        what = f"context parallel {plan.context} can be predicted and not trained yet"
        return Problem(where="plan.axes", what=what, fix="choose a context axis of 1")
    return None


def experts_laid(design: Design) -> Problem | None:
    """The runtime lays the grid of experts, and routes as the model says on every rank."""
    plan, grid = design.plan, design.plan.experts
    ranks, inside = plan.world_size // plan.pipeline, plan.shard * plan.context * plan.tensor
    if grid is not None:
        held = grid.expert * grid.tensor
        if ranks % (held * max(inside // held, 1)):
            what = f"{ranks} ranks of a stage are not whole grids of {held} ranks that share {inside // held} ways"
            fix = f"choose degrees whose product divides {inside}"
            return Problem(where="plan.experts", what=what, fix=fix)
    for index, layer in enumerate(design.model.layers):
        how = layer.transform.routing if isinstance(layer.transform, Mixture) else None
        if how is not None and plan.context > 1 and (how.capacity is not None or how.balance_loss):
            what = "experts counted over a sequence that context ranks divide can be predicted and not trained yet"
            fix = "choose neither capacity nor balance_loss, or a context axis of 1"
            return Problem(where=f"model.layers[{index}].transform.routing", what=what, fix=fix)
    return None


def schedule_played(design: Design) -> Problem | None:
    """The runtime plays the schedule."""
    schedule = design.plan.schedule
    if schedule.kind not in TRAINED_SCHEDULES or schedule.slices > 1:
        what = f"{schedule.kind.value} can be predicted and not trained yet"
        known = ", ".join(kind.value for kind in TRAINED_SCHEDULES)
        return Problem(where="plan.schedule.kind", what=what, fix=f"choose {known}")
    return None


def offload_built(design: Design) -> Problem | None:
    """What the plan keeps in the host's memory, the runtime keeps there."""
    for where, group in groups_of(design.plan):
        if group.offload is not Offload.NONE:
            what = f"offload of {group.offload.value} can be predicted and not trained yet"
            return Problem(where=f"{where}.offload", what=what, fix="choose none")
    return None


UNTRAINED: tuple[tuple[str, int | str | None], ...] = (
    *((name, None) for name in ("context", "offload", "slices")),
    *(("schedule", kind.value) for kind in ScheduleKind if kind not in TRAINED_SCHEDULES),
)  # constraint columns, None being every use of one: what plans that the rules below refuse have in common

RUNTIME_RULES = (
    Rule(name="runtime-axes", scope=Scope.RUNTIME, check=axes_built),
    Rule(name="runtime-experts", scope=Scope.RUNTIME, check=experts_laid),
    Rule(name="runtime-schedule", scope=Scope.RUNTIME, check=schedule_played),
    Rule(name="runtime-offload", scope=Scope.RUNTIME, check=offload_built),
    Rule(name="runtime-precision", scope=Scope.RUNTIME, check=precision_trained),
    Rule(name="runtime-layers", scope=Scope.RUNTIME, check=layers_built),
    Rule(name="runtime-towers", scope=Scope.RUNTIME, check=towers_built),
)
