"""Rules of the runtime: designs that can be predicted and that it cannot train yet. Each is lifted by a feature."""

from __future__ import annotations

from meshwright.schedule import planned
from meshwright.schedule.build import SPLIT
from meshwright.search.rules import Rule, Scope, divisors, groups_of
from meshwright.search.used import used_of
from meshwright.spec.cluster import ClusterSpec, DeviceKind, Precision
from meshwright.spec.errors import Problem
from meshwright.spec.job import JobSpec, Switch
from meshwright.spec.model import Attention, LatentAttention, Mixture, ModelSpec, Recurrence
from meshwright.spec.optimizer import Master, OptimizerKind
from meshwright.spec.plan import Design, Offload, ScheduleKind, TensorGrid

TRAINED_PRECISIONS = (Precision.BF16, Precision.FP16, Precision.FP32, Precision.TF32, Precision.FP64)
EIGHT_BIT_GRADIENTS = (Precision.FP8, Precision.INT8)
GRADIENT_PRECISIONS = (Precision.FP64, Precision.FP32, Precision.BF16, *EIGHT_BIT_GRADIENTS)
SCALED_PRECISIONS = (Precision.FP8, Precision.FP8_ROW)
_UPDATED_BY_HOSTS = (Offload.OPTIMIZER, Offload.PARAMETERS)
EMULATED_PRECISIONS = tuple(precision for precision in Precision if precision.quantized)


def devices_trained(design: Design) -> Problem | None:
    """The runtime's processes reach every device of the plan."""
    first = 0
    for index, group in enumerate(design.cluster.groups):
        if group.device.kind is DeviceKind.TPU and first < design.plan.world_size:
            return Problem(
                where=f"cluster.groups[{index}].device",
                what=f"plans on {group.device.name} can be predicted and not trained yet",
                why="torch's process groups do not reach TPUs",
                fix="plan for GPUs or processors to train",
            )
        first += group.num_devices
    return None


def precision_trained(design: Design) -> Problem | None:
    """The runtime multiplies in the plan's precision, and has a kernel for tiles of scores where sequences are cut."""
    used = used_of(design.plan, design.cluster)
    trained = trained_precisions(used, design.model)
    if design.plan.context > 1 and design.plan.first_group.precision is Precision.FP16 and lacks_flash(used):
        return Problem(
            where="plan.axes",
            what="context ranks in fp16 on devices before Ampere can be predicted and not trained yet",
            why="torch has no kernel there that tells how tiles of scores are put together",
            fix="choose context 1, or fp32",
        )
    for where, group in groups_of(design.plan):
        if group.precision not in trained:
            emulated = group.precision in EMULATED_PRECISIONS
            why = "it is emulated, which is slower than bf16: on processors alone" if emulated else ""
            if group.precision in SCALED_PRECISIONS:
                why = "devices without units for it, and experts on accelerators, would emulate it"
            return Problem(
                where=f"{where}.precision",
                what=f"{group.precision.value} can be predicted and not trained yet",
                why=why,
                fix=f"choose {', '.join(precision.value for precision in _known(used, trained))}",
            )
    return None


def lacks_flash(cluster: ClusterSpec) -> bool:
    """FlashAttention-2 does not run on some of its devices."""
    return not all(group.device.has_flash for group in cluster.groups)


def _known(cluster: ClusterSpec, trained: tuple[Precision, ...]) -> tuple[Precision, ...]:
    """Those of `trained` that all devices multiply in; all where none is."""
    peaks = [group.device.peak_flops for group in cluster.groups]
    return tuple(kind for kind in trained if all(peak.get(kind) for peak in peaks)) or trained


def trained_precisions(cluster: ClusterSpec, model: ModelSpec) -> tuple[Precision, ...]:
    """Precisions that the runtime multiplies `model` in: on processors, where figures of speed mislead nobody, also
    emulated ones, and on accelerators those that their units know, where all products are of linears."""
    devices = [group.device for group in cluster.groups]
    if all(device.kind is DeviceKind.CPU for device in devices):
        return TRAINED_PRECISIONS + EMULATED_PRECISIONS
    dense = not any(isinstance(layer.transform, Mixture) for layer in model.layers)
    own = dense and all(device.kind is DeviceKind.CUDA and device.peak_flops.get(Precision.FP8) for device in devices)
    return TRAINED_PRECISIONS + (SCALED_PRECISIONS if own else ())


def products_whole(design: Design) -> Problem | None:
    """Products of rounded operands go backward in one piece, and each on one tensor rank."""
    plan, precision = design.plan, design.plan.first_group.precision
    if precision not in EMULATED_PRECISIONS:
        return None
    least = min(design.model.kv_heads, default=plan.tensor)
    if plan.tensor > least and plan.tensor_grid is TensorGrid.LINE:
        what = f"{precision.value} products of key-value heads of which tensor ranks hold copies"
        told = f"{what} can be predicted and not trained yet"
        why = "each holder would round its own share of their gradient"
        return Problem(where="plan.axes", what=told, why=why, fix=f"choose a tensor degree up to {least}, or bf16")
    if not planned.splits(plan.schedule) or plan.pipeline == 1:
        return None
    what = f"{precision.value} products whose backward {plan.schedule.kind.value} splits"
    fix = "choose 1f1b, or bf16"
    return Problem(where="plan.schedule.kind", what=f"{what} can be predicted and not trained yet", fix=fix)


def gradients_reduced(design: Design) -> Problem | None:
    """Gradients meet in the precision that the plan says."""
    plan, where = design.plan, "plan.gradients.precision"
    precision = plan.gradients.precision
    if precision not in GRADIENT_PRECISIONS:
        what = f"gradients that meet in {precision.value} can be predicted and not trained yet"
        return Problem(where=where, what=what, fix=f"choose {', '.join(kind.value for kind in GRADIENT_PRECISIONS)}")
    if precision not in EIGHT_BIT_GRADIENTS:
        return None
    against = {
        "among replicas of shards in the host's memory": any(
            group.offload is Offload.PARAMETERS and plan.repeats(group) > 1 for group in plan.groups
        ),
        "with experts on a grid of their own": plan.experts is not None,
        f"under {plan.schedule.kind.value}": planned.splits(plan.schedule)
        or plan.schedule.kind is ScheduleKind.BREADTH_FIRST,
    }
    for how, refused in against.items():
        if refused:
            what = f"gradients that meet in {precision.value} {how} can be predicted and not trained yet"
            return Problem(where=where, what=what, fix="choose bf16 or fp32")
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
        if isinstance(layer.mixer, Attention) and layer.mixer.gated:
            what = "attention with a gate on what it gives can be predicted and not trained yet"
            return Problem(where=f"model.layers[{index}].mixer.gated", what=what, fix="choose attention without a gate")
        if isinstance(layer.mixer, LatentAttention) and layer.mixer.indexer:
            what = "sparse attention with an indexer can be predicted and not trained yet"
            return Problem(where=f"model.layers[{index}].mixer.indexer", what=what, fix="choose dense attention")
        shared = layer.transform.shared if isinstance(layer.transform, Mixture) else None
        if shared is not None and (shared.norm or shared.post_norm):
            what = "a shared branch with norms of its own can be predicted and not trained yet"
            fix = "make it the layer's dense branch"
            return Problem(where=f"model.layers[{index}].transform.shared", what=what, fix=fix)
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


def experts_laid(design: Design) -> Problem | None:
    """The runtime lays the grid of experts."""
    plan, grid = design.plan, design.plan.experts
    ranks, inside = plan.world_size // plan.pipeline, plan.shard * plan.context * plan.tensor
    if grid is None:
        return None
    held = grid.expert * grid.tensor
    if ranks % (held * max(inside // held, 1)) == 0:
        return None
    what = f"{ranks} ranks of a stage are not whole grids of {held} ranks that share {inside // held} ways"
    return Problem(where="plan.experts", what=what, fix=f"choose degrees whose product divides {inside}")


def schedule_played(design: Design) -> Problem | None:
    """The runtime cuts sequences into slices where pipeline ranks take them in turn; context ranks share each."""
    plan, slices = design.plan, design.plan.schedule.slices
    if slices == 1:
        return None
    where, fix = "plan.schedule.slices", "choose 1"
    if plan.pipeline == 1:
        return Problem(where=where, what=f"{slices} slices on one pipeline rank fill no pipeline", fix=fix)
    tokens = plan.sequence_length // slices
    if plan.context > 1 and tokens % (2 * plan.context):
        what = f"slices of {tokens:,} tokens do not divide over 2 x context {plan.context}"
        return Problem(where=where, what=what, fix="choose fewer slices")
    if plan.first_group.sequence_parallel and (tokens // plan.context) % plan.tensor:
        what = f"slices of {tokens // plan.context:,} tokens do not divide over {plan.tensor} tensor ranks"
        return Problem(where=where, what=what, fix="choose fewer slices, or no sequence parallel")
    return None


def compile_fits(design: Design) -> Problem | None:
    """What is compiled goes backward in one piece, and sees whole sequences."""
    plan, schedule = design.plan, design.plan.schedule
    if design.job.compile is not Switch.ON or plan.pipeline == 1:
        return None
    fix = 'choose "off", or a schedule of whole passes such as 1f1b'
    if planned.splits(schedule):
        what = f"{schedule.kind.value} splits backwards, and compiled ones are one piece"
        return Problem(where="job.compile", what=what, fix=fix)
    if schedule.slices > 1:
        what = f"{schedule.kind.value} passes keys and values between slices, which compiled layers do not"
        return Problem(where="job.compile", what=what, fix=fix)
    return None


def offload_built(design: Design) -> Problem | None:
    """What the plan keeps in the host's memory, the runtime keeps there."""
    job = design.job
    for where, group in groups_of(design.plan):
        if group.offload is Offload.PARAMETERS and design.plan.experts is not None:
            what = (
                "parameters in the host's memory, experts on a grid of their own, can be predicted and not trained yet"
            )
            return Problem(where=f"{where}.offload", what=what, fix="choose none or optimizer, or leave the grid out")
        if group.offload in _UPDATED_BY_HOSTS and not updated_by_hosts(job):
            what = f"the state of {job.optimizer.kind} in the host's memory can be predicted and not trained yet"
            why = "its step needs whole matrices, and hosts exchange none"
            return Problem(where=f"{where}.offload", what=what, why=why, fix="choose none, or adamw or sgd")
        if group.offload is Offload.ACTIVATIONS and job.compile is not Switch.OFF:
            what = "activations of compiled layers in the host's memory can be predicted and not trained yet"
            return Problem(where=f"{where}.offload", what=what, fix='choose none, or set job.compile = "off"')
    return None


def master_kept(design: Design) -> Problem | None:
    """Parameters that are kept in bf16 alone are AdamW's, on the device, and what multiplies is bf16 too."""
    job, plan = design.job, design.plan
    if job.master is Master.FP32:
        return None
    groups = [group for _, group in groups_of(plan)]
    narrow = (Precision.BF16, *EMULATED_PRECISIONS)
    against = {
        "of another optimizer than adamw": any(
            group.kind not in (None, job.optimizer.kind) for group in job.optimizer.groups
        ),
        "that are not multiplied in bf16": any(group.precision not in narrow for group in groups),
        "whose optimizer is in the host's memory": any(group.offload is Offload.OPTIMIZER for group in groups),
        "whose gradients travel in eight bits": plan.gradients.precision in EIGHT_BIT_GRADIENTS,
    }
    for how, refused in against.items():
        if refused:
            what = f"parameters kept in bf16 {how} can be predicted and not trained yet"
            return Problem(where="job.optimizer.master", what=what, fix='choose master = "fp32"')
    return None


def updated_by_hosts(job: JobSpec) -> bool:
    """Every parameter's step looks at that parameter alone."""
    kinds = {job.optimizer.kind, *(group.kind for group in job.optimizer.groups)}
    return kinds <= {OptimizerKind.ADAMW, OptimizerKind.SGD, None}


def untrained(job: JobSpec) -> tuple[tuple[str, int | str | None], ...]:
    """Constraint columns, None being every use of one: what plans of `job` that are refused here have in common."""
    found: list[tuple[str, int | str | None]] = []
    if not updated_by_hosts(job) or job.master is not Master.FP32:
        found.append(("offload", Offload.OPTIMIZER.value))
    if not updated_by_hosts(job):
        found.append(("offload", Offload.PARAMETERS.value))
    if job.constraints.fix.get("offload") == Offload.PARAMETERS.value:
        found.append(("expert", None))
    if job.compile is not Switch.OFF:
        found.append(("offload", Offload.ACTIVATIONS.value))
    if job.compile is Switch.ON:
        found += [*(("schedule", kind.value) for kind in sorted(SPLIT)), ("slices", None)]
    return tuple(found)


def untrained_with_context(length: int, *, context: int) -> tuple[tuple[str, int | str | None], ...]:
    """As `untrained`, of plans with a context axis of up to so many ranks: slices that it does not divide."""
    return tuple(("slices", count) for count in divisors(length) if length % (2 * context * count))


def rows_may_be_empty(design: Design) -> Problem | None:
    """A row without a sequence adds nothing to what is learnt: no router counts it, and ranks meet in every step."""
    plan = design.plan
    if not plan.empty_rows:
        return None
    where, fix = "plan.empty_rows", "choose 0, and data ranks that divide the batch"
    if any(isinstance(layer.transform, Mixture) for layer in design.model.layers):
        return Problem(where=where, what="routers of experts would count rows that have no sequence", fix=fix)
    if plan.learners > 1 or design.job.elastic.by_torchft:
        who = "learners" if plan.learners > 1 else "replicas under torchft"
        return Problem(where=where, what=f"{who} share a batch among themselves, without empty rows", fix=fix)
    return None


RUNTIME_RULES = (
    Rule(name="runtime-devices", scope=Scope.RUNTIME, check=devices_trained),
    Rule(name="runtime-experts", scope=Scope.RUNTIME, check=experts_laid),
    Rule(name="runtime-schedule", scope=Scope.RUNTIME, check=schedule_played),
    Rule(name="runtime-compile", scope=Scope.RUNTIME, check=compile_fits),
    Rule(name="runtime-offload", scope=Scope.RUNTIME, check=offload_built),
    Rule(name="runtime-precision", scope=Scope.RUNTIME, check=precision_trained),
    Rule(name="runtime-master", scope=Scope.RUNTIME, check=master_kept),
    Rule(name="runtime-gradients", scope=Scope.RUNTIME, check=gradients_reduced),
    Rule(name="runtime-products", scope=Scope.RUNTIME, check=products_whole),
    Rule(name="runtime-layers", scope=Scope.RUNTIME, check=layers_built),
    Rule(name="runtime-towers", scope=Scope.RUNTIME, check=towers_built),
    Rule(name="runtime-empty-rows", scope=Scope.RUNTIME, check=rows_may_be_empty),
)
