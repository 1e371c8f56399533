"""A plan as a job file of torchtitan 0.2.2 (TOML), with the torchrun line that starts it in its head."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.cost.layout import Layout
from meshwright.export.columns import Columns
from meshwright.export.compare import Line
from meshwright.export.lost import evaluation_words, lost_checkpoints, lost_lines, lost_start, lost_watch, saves_every
from meshwright.export.meaning import Meaning, Sizes, meaning, yarn_score_scale
from meshwright.export.refuse import (
    Refusals,
    refuse_all,
    refuse_copied_heads,
    refuse_everywhere,
    refuse_layout,
    refuse_odd_model,
)
from meshwright.export.torchtitan_models import FLAVORS, flavor_of, nearest_flavor
from meshwright.spec.cluster import Precision
from meshwright.spec.exchange import ExchangeKind, TokenLayout
from meshwright.spec.job import Switch
from meshwright.spec.plan import Design, Offload, Recompute, ScheduleKind, Sharding

PEER = "torchtitan"
_SCHEDULES = {
    ScheduleKind.GPIPE: "GPipe",
    ScheduleKind.ONE_F_ONE_B: "1F1B",
    ScheduleKind.INTERLEAVED: "Interleaved1F1B",
    ScheduleKind.BREADTH_FIRST: "LoopedBFS",
    ScheduleKind.ZERO_BUBBLE_V: "ZBVZeroBubble",
    ScheduleKind.DUAL_PIPE_V: "DualPipeV",
}
_CONVERTERS = {Precision.FP8: "quantize.linear.float8", Precision.MXFP8: "quantize.linear.mx"}
PRECISIONS = (Precision.BF16, Precision.FP32, *_CONVERTERS)
_WITHOUT_PIPELINE = ("qwen3",)
_FEW = 3  # differences between a model and a flavor that are told one by one


def write(design: Design) -> str:
    """The job file of the plan. Raises NotExpressible with everything that torchtitan cannot say."""
    said = meaning(design)
    refuse_all(design, refuse, peer=PEER)
    per_node = said.devices // said.nodes
    found = flavor_of(_shape(said.model, said.sequence_length), sequence_length=said.sequence_length)
    assert found is not None, "models without a flavor are refused"
    name, flavor = found
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": name, "flavor": flavor, "converters": _converters(said)},
        "optimizer": _optimizer(said),
        "lr_scheduler": _schedule_of_rate(said),
        "training": _training(said),
        "parallelism": _parallelism(said),
        "activation_checkpoint": {"mode": said.recompute[0].value},
        "compile": {"enable": design.job.compile is Switch.ON},
        **_checkpoints(design),
        "debug": {"seed": design.job.seed, "deterministic": design.job.deterministic},
    }
    launch = f"torchrun --nnodes {said.nodes} --nproc_per_node {per_node} --rdzv_backend c10d"
    head = f'# {launch} --rdzv_endpoint "$MASTER_ADDR:29500" -m torchtitan.train --job.config_file THIS_FILE\n'
    return head + "\n".join(_table(name, values) for name, values in tables.items())


def lost(design: Design) -> tuple[Line, ...]:
    """What is not of the layout, and is torchtitan's own affair or the user's to add."""
    lines = [
        ("text and tokenizer", "job.data", "training.dataset and model.hf_assets_path are yours to add"),
        ("weight decay", "matrices", "every parameter"),
        ("loss", "cross entropy", "cross entropy, its vocabulary divided over tensor ranks"),
        ("evaluation", evaluation_words(design), "none; [validation] with its dataset is yours to add"),
    ]
    spec = design.job.checkpoint
    kept = "2, the least" if spec.keep == 1 else f"{spec.keep or 'all'}" if spec.keep_every_steps else ""
    fix = "a [checkpoint] that is enabled is yours to add, or plan with --set checkpoint.every_steps"
    lines += lost_checkpoints(design, folder="job.dump_folder", kept=kept, written="", fix=fix)
    lines += lost_watch(
        design,
        non_finite="taken as any other step",
        waits="300 s until the first step is done and 100 s then; [comm] with its timeouts is yours to add",
        verify="never",
        trackers="[metrics] is yours to add",
    )
    lines += lost_start(design, fix="checkpoint.initial_load_path is yours to add")
    if design.job.compile is Switch.AUTO:
        lines.append(("compile", "auto", "off"))
    if design.job.z_loss:
        lines.append(("z loss", str(design.job.z_loss), "none"))
    if design.job.data.document_mask:
        lines.append(("document mask", "on", "off, unless the flavor is one with attn_mask_type block_causal"))
    said = meaning(design)
    if said.sharding is Sharding.GRADIENTS and said.microbatches > 1:
        lines.append(("parameters", "gathered once a step", "gathered once a microbatch"))
    if said.precision in _CONVERTERS:
        lines.append(("head", said.precision.value, "all products but those with a side not divisible by 16"))
    return lost_lines(lines)


def nearest(design: Design) -> Meaning:
    """The flavors of DeepSeek have another epsilon and stretch nothing in short sequences; experts have biases that
    balance them and no loss, whatever the model, and first weights are drawn as each flavor has it."""
    said = meaning(design)
    return replace(said, model=_shape(said.model, said.sequence_length))


def _shape(shape: Sizes, sequence_length: int) -> Sizes:
    """The sizes as a flavor would have them, where what flavors have otherwise is lost and not refused."""
    if shape.latent:
        shape = replace(shape, norm_epsilon=1e-5)
        if sequence_length <= 4096:
            shape = replace(shape, scaling="none", score_scale=yarn_score_scale(shape, 1.0))
    routing = shape.routing.partition(", loss ")[0]
    if shape.mixture and "bias" not in routing:
        routing = f"{routing}, bias 0.001"
    return replace(shape, routing=routing, first_weights="its own")


def refuse(said: Columns) -> Refusals:
    """What torchtitan cannot say of each row."""
    found, table = Refusals(PEER), said.table
    refuse_everywhere(said, found)
    refuse_copied_heads(said, found, why="it raises where tensor ranks do not divide them")
    flavor = _flavor(said, found)
    bare = (table.pipeline > 1) & (flavor in _WITHOUT_PIPELINE)
    found.when(bare, "plan.axes", f"a pipeline of {flavor}", why="its pipelining_fn is None", fix="choose pipeline 1")
    _refuse_schedule(said, found)
    _refuse_states(said, found)
    _refuse_layers(said, found)
    where, precision = "plan.stages[*].groups[*].precision", said.word("precision")
    known_precision = said.among("precision", *PRECISIONS)
    found.when(~known_precision, where, f"{precision} products", fix="choose bf16")
    mixed = (table.divided == 1) & (table.tensor * table.pipeline > 1) & ~said.among("precision", Precision.FP32)
    why = "it mixes precisions in FSDP, or where neither tensor nor pipeline ranks are"
    found.when(mixed, where, f"{precision} with nothing sharded", why=why, fix="shard the states")
    where, what = "plan.gradients.precision", f"gradients reduced in {said.word('gradient_precision')}"
    found.when(~said.among("gradient_precision", Precision.FP32), where, what, fix="choose fp32")
    if said.has_experts:
        _refuse_experts(said, found)
    return found


def _flavor(said: Columns, found: Refusals) -> str:
    """The model of torchtitan that has a flavor of the sizes of ours; "" where none has, which is refused."""
    length = said.job.sequence_length
    wanted = _shape(said.sizes, length)
    if known := flavor_of(wanted, sequence_length=length):
        refuse_odd_model(said, found)
        return known[0]
    flavor, differing = nearest_flavor(wanted, sequence_length=length)
    told = ", ".join(f"{field.replace('_', ' ')} {theirs} and not {ours}" for field, ours, theirs in differing)
    fix = f"the nearest, {flavor}, has {told}" if len(differing) <= _FEW else f"it has {', '.join(FLAVORS)}"
    found.when(True, "model", f"the model {said.model.name}", why="it has no flavor of these sizes", fix=fix)
    return ""


def _refuse_schedule(said: Columns, found: Refusals) -> None:
    table, where = said.table, "plan.schedule.kind"
    unknown = ~said.among("schedule", *_SCHEDULES) | ((table.pipeline == 1) & (table.chunks > 1))
    near = "choose interleaved, zb-v or 1f1b" if said.number("pipeline") > 1 else "choose 1f1b of one chunk"
    found.when(unknown, where, f"the {said.word('schedule')} schedule", fix=near)
    turns = said.of_layouts(
        lambda layout: layout.ranks == tuple(at % layout.pipeline for at in range(len(layout.ranks)))
    )
    back = said.of_layouts(lambda layout: layout.ranks == _there_and_back(layout))
    placed = np.where(said.among("schedule", ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUAL_PIPE_V), back, turns)
    found.when(~placed, "plan.stages", f"stages placed otherwise than {said.word('schedule')} places them")


def _there_and_back(layout: Layout) -> tuple[int, ...]:
    """The ranks of V shaped schedules: from the first to the last and back, again and again."""
    turn = 2 * layout.pipeline
    return tuple(min(at % turn, turn - 1 - at % turn) for at in range(len(layout.ranks)))


def _refuse_states(said: Columns, found: Refusals) -> None:
    where, kind, table = "plan.stages[*].groups[*].sharding", said.word("sharding"), said.table
    divided, piped = table.divided, table.pipeline > 1
    what = f"{kind} over {int(divided[0])} ranks"
    none, first = said.among("sharding", Sharding.NONE), said.among("sharding", Sharding.OPTIMIZER)
    apart = none & (divided > 1)
    found.when(apart, where, "context ranks that share no states", why="FSDP spans them", fix="choose zero3")
    joined = none & (table.replicate > 1) & (table.tensor * table.pipeline > 1)
    why = "DDP has not supported > 1D parallelism"
    found.when(joined, where, "replicas beside tensor or pipeline ranks, nothing sharded", why=why, fix="shard")
    why = "FSDP scatters gradients every microbatch"
    found.when(first & ~piped, where, what, why=why, fix="choose zero2 or zero3")
    why = "under a pipeline its FSDP keeps gradients whole until the last microbatch"
    found.when(~none & ~first & piped, where, f"{what} with a pipeline", why=why, fix="choose zero1")


def _refuse_layers(said: Columns, found: Refusals) -> None:
    groups, table = "plan.stages[*].groups[*]", said.table
    found.when(said.mixes(0), f"{groups}.recompute", "recompute that differs between layers", fix="choose one for all")
    why = "its selective mode keeps every other product, or every other layer"
    chosen = said.uses("recompute", Recompute.SELECTIVE)
    found.when(chosen, f"{groups}.recompute", "recompute of attention alone", why=why, fix="choose none or full")
    why = "enable_cpu_offload moves parameters, gradients and optimizer state together"
    moved = said.uses("offload", Offload.OPTIMIZER, Offload.ACTIVATIONS, Offload.PARAMETERS)
    what = f"{said.word('offload')} alone in the host's memory"
    found.when(moved, f"{groups}.offload", what, why=why, fix="choose none")
    apart = (table.tensor > 1) & (table.sequence_parallel == 0)
    found.when(apart, f"{groups}.sequence_parallel", "tensor ranks that are not sequence parallel", fix="choose true")
    length = said.job.sequence_length
    what = f"{length} tokens over tensor {said.number('tensor')} x 2 x context {said.number('context')}"
    uneven = length % (table.tensor * 2 * table.context) != 0
    found.when(uneven, "plan.sequence_length", what, why="it asserts that they divide")
    why = "0.2.2 sets the rotate method in validation alone, and training gathers as torch does unless told"
    gathers = (table.context == 1) | ((table.inner == 1) & said.among("exchange", ExchangeKind.GATHER))
    found.when(~gathers, "plan.exchange", f"{said.word('exchange')} of keys and values", why=why, fix="choose gather")
    refuse_layout(said, found, TokenLayout.ZIGZAG)


def _refuse_experts(said: Columns, found: Refusals) -> None:
    expert, slices, table = said.expert, said.expert_tensor, said.table
    tensor, several = said.number("tensor"), said.number("expert") > 1
    fix = f"choose tensor 1 or {tensor}" if several else f"choose tensor {tensor}"
    odd = (slices != table.tensor) & ~((expert > 1) & (slices == 1))
    what = f"experts divided by {said.number('expert_tensor')} beside tensor {tensor}"
    found.when(odd, "plan.experts.tensor", what, fix=fix)
    ranks = table.divided * table.tensor
    what = f"expert {said.number('expert')} x tensor {said.number('expert_tensor')} over {int(ranks[0])} ranks"
    why = "its experts live within shard x context x tensor ranks"
    found.when(ranks % (expert * slices) != 0, "plan.experts", what, why=why)


def _converters(said: Meaning) -> list[str]:
    return [_CONVERTERS[said.precision]] if said.precision in _CONVERTERS else []


def _checkpoints(design: Design) -> dict[str, dict[str, Any]]:
    """A table where the job says how often; it keeps all for 0, and else two or more."""
    every, spec = saves_every(design), design.job.checkpoint
    keep = max(spec.keep, 2) if spec.keep else 0
    told = {"enable": True, "interval": every, "keep_latest_k": keep}
    return {"checkpoint": told | {"async_mode": "async" if spec.asynchronous else "disabled"}} if every else {}


def _optimizer(said: Meaning) -> dict[str, Any]:
    asked = said.optimizer
    return {
        "name": "AdamW",
        "lr": asked.learning_rate,
        "beta1": asked.beta1,
        "beta2": asked.beta2,
        "eps": asked.epsilon,
        "weight_decay": asked.weight_decay,
    }


def _schedule_of_rate(said: Meaning) -> dict[str, Any]:
    asked = said.optimizer
    shape = {"decay_type": "cosine" if asked.decay == "cosine" else "linear", "min_lr_factor": asked.final_fraction}
    ratio = {"decay_ratio": asked.decay_steps / asked.steps} if asked.decay == "wsd" else {}
    return {"warmup_steps": asked.warmup, **ratio, **shape}


def _training(said: Meaning) -> dict[str, Any]:
    local = said.microbatch * (said.microbatches if said.pipeline > 1 else 1)
    clip = said.optimizer.clip_norm
    return {
        "seq_len": said.sequence_length,
        "local_batch_size": local,
        "global_batch_size": said.batch,
        "steps": said.optimizer.steps,
        "max_norm": math.inf if clip is None else clip,
        "mixed_precision_param": "float32" if said.precision is Precision.FP32 else "bfloat16",
        "mixed_precision_reduce": "float32",
    }


def _parallelism(said: Meaning) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": said.replicate,
        "data_parallel_shard_degree": said.shard,
        "tensor_parallel_degree": said.tensor,
        "context_parallel_degree": said.context,
        "pipeline_parallel_degree": said.pipeline,
    }
    if said.sharding is not Sharding.NONE:
        found["fsdp_reshard_after_forward"] = "always" if said.sharding is Sharding.PARAMETERS else "never"
    if said.expert_grid:
        expert, tensor = said.expert_grid
        found |= {"expert_parallel_degree": expert, "expert_tensor_parallel_degree": tensor if expert > 1 else 1}
    if said.pipeline > 1:
        found |= {
            "pipeline_parallel_schedule": _SCHEDULES[said.schedule],
            "pipeline_parallel_microbatch_size": said.microbatch,
            "module_fqns_per_model_part": [_modules(start, stop, said) for _, start, stop in said.stages],
        }
        if said.schedule is ScheduleKind.DUAL_PIPE_V and Recompute.NONE not in said.recompute:
            found["pipeline_parallel_expert_parallel_overlap"] = False
    return found


def _modules(start: int, stop: int, said: Meaning) -> list[str]:
    last = said.model.layers + 1
    layers = [f"layers.{block - 1}" for block in range(max(start, 1), min(stop, last))]
    return ["tok_embeddings"] * (start == 0) + layers + ["norm", "output"] * (stop > last)


def _table(name: str, values: dict[str, Any]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items()), ""])


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {_value(entry)},\n" for entry in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)
