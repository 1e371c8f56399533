"""Rules of the runtime: designs that can be predicted and that it cannot train yet. Each is lifted by a feature."""

from __future__ import annotations

from meshwright.schedule.build import SPLIT
from meshwright.search.degree_rules import groups_of
from meshwright.search.rules import Rule, Scope, choices
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import Problem
from meshwright.spec.job import Switch
from meshwright.spec.model import Attention, LatentAttention, Mixture, Recurrence
from meshwright.spec.plan import Design, Offload

REDUCED_PRECISIONS = (Precision.BF16, Precision.FP32)
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


def gradients_reduced(design: Design) -> Problem | None:
    """The runtime reduces gradients in bf16, or as it keeps them."""
    precision = design.plan.gradients.precision
    if precision in REDUCED_PRECISIONS:
        return None
    what = f"gradients reduced in {precision.value} can be predicted and not trained yet"
    return Problem(where="plan.gradients.precision", what=what, fix=choices(kind.value for kind in REDUCED_PRECISIONS))


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
    if plan.experts is not None:
        what = "a grid of experts can be predicted and not trained yet"
        return Problem(where="plan.experts", what=what, fix="leave it out: the tensor axis divides every expert")
    return None


def schedule_played(design: Design) -> Problem | None:
    """The runtime cuts sequences into slices where pipeline ranks take them in turn, and each is whole on a rank."""
    plan, slices = design.plan, design.plan.schedule.slices
    if slices == 1:
        return None
    where, fix = "plan.schedule.slices", "choose 1"
    if plan.pipeline == 1:
        return Problem(where=where, what=f"{slices} slices on one pipeline rank fill no pipeline", fix=fix)
    if plan.context > 1:
        what = f"{slices} slices of sequences that a context axis of {plan.context} divides can be predicted and not "
        return Problem(where=where, what=what + "trained yet", fix=fix)
    if plan.first_group.sequence_parallel and (plan.sequence_length // slices) % plan.tensor:
        what = f"slices of {plan.sequence_length // slices:,} tokens do not divide over {plan.tensor} tensor ranks"
        return Problem(where=where, what=what, fix="choose fewer slices, or no sequence parallel")
    return None


def compile_fits(design: Design) -> Problem | None:
    """What is compiled goes backward in one piece, and sees whole sequences."""
    plan, schedule = design.plan, design.plan.schedule
    if design.job.compile is not Switch.ON or plan.pipeline == 1:
        return None
    fix = 'choose "off", or a schedule of whole passes such as 1f1b'
    if schedule.kind in SPLIT:
        what = f"{schedule.kind.value} splits backwards, and compiled ones are one piece"
        return Problem(where="job.compile", what=what, fix=fix)
    if schedule.slices > 1:
        what = f"{schedule.kind.value} passes keys and values between slices, which compiled layers do not"
        return Problem(where="job.compile", what=what, fix=fix)
    return None


def offload_built(design: Design) -> Problem | None:
    """What the plan keeps in the host's memory, the runtime keeps there."""
    for where, group in groups_of(design.plan):
        if group.offload is not Offload.NONE:
            what = f"offload of {group.offload.value} can be predicted and not trained yet"
            return Problem(where=f"{where}.offload", what=what, fix="choose none")
    return None


UNTRAINED: tuple[tuple[str, int | str | None], ...] = tuple((name, None) for name in ("context", "expert", "offload"))
# constraint columns, None being every use of one: what plans that the rules below refuse have in common

RUNTIME_RULES = (
    Rule(name="runtime-axes", scope=Scope.RUNTIME, check=axes_built),
    Rule(name="runtime-schedule", scope=Scope.RUNTIME, check=schedule_played),
    Rule(name="runtime-compile", scope=Scope.RUNTIME, check=compile_fits),
    Rule(name="runtime-offload", scope=Scope.RUNTIME, check=offload_built),
    Rule(name="runtime-precision", scope=Scope.RUNTIME, check=precision_trained),
    Rule(name="runtime-gradients", scope=Scope.RUNTIME, check=gradients_reduced),
    Rule(name="runtime-layers", scope=Scope.RUNTIME, check=layers_built),
    Rule(name="runtime-towers", scope=Scope.RUNTIME, check=towers_built),
)
