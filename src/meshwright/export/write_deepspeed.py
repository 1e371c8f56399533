"""A plan for DeepSpeed 0.19 under Megatron-DeepSpeed's pretrain_gpt.py: ds_config.json, flags and the launcher line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from meshwright.export.columns import Columns
from meshwright.export.compare import Line
from meshwright.export.lost import lost_balance, lost_lines
from meshwright.export.meaning import Meaning, meaning
from meshwright.export.megatron_flags import lost_to_flags, optimizer_flags, refuse_activation, size_flags
from meshwright.export.refuse import (
    Refusals,
    refuse_all,
    refuse_copied_heads,
    refuse_everywhere,
    refuse_layout,
    refuse_odd_model,
    refuse_uneven_vocabulary,
)
from meshwright.export.script import Flag, launch_script
from meshwright.spec.cluster import Precision
from meshwright.spec.exchange import TokenLayout
from meshwright.spec.job import Decay, Switch
from meshwright.spec.model import Mixture
from meshwright.spec.plan import Design, Offload, Recompute, ScheduleKind, Sharding
from meshwright.spec.routing import Routing, Weighing

PEER = "DeepSpeed"
_STAGES = {Sharding.NONE: 0, Sharding.OPTIMIZER: 1, Sharding.GRADIENTS: 2, Sharding.PARAMETERS: 3}
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.BF16)
_REDUCED = {Precision.FP32: "fp32", Precision.BF16: "bf16", Precision.FP16: "fp16"}


def write(design: Design) -> str:
    """A script that writes ds_config.json and starts the plan. Raises NotExpressible with all that cannot be said."""
    said = meaning(design)
    refuse_all(design, refuse, peer=PEER)
    config = json.dumps(_config(said), indent=2)
    launcher: list[Flag] = [
        ("--num_nodes", said.nodes),
        ("--num_gpus", said.devices // said.nodes),
        ("--master_port", "${MASTER_PORT:-29500}"),
    ]
    flags = [
        ("--deepspeed",),
        ("--deepspeed_config", "ds_config.json"),
        ("--zero-stage", _STAGES[said.sharding]),
        *_layout(said),
        *_model(said, design),
        *optimizer_flags(said, design, decay=said.optimizer.decay),
    ]
    told = "# Every node reads ds_config.json: start this in a folder that all nodes see.\n" if said.nodes > 1 else ""
    before = (f"{told}cat > ds_config.json <<'JSON'\n{config}\nJSON",)
    return launch_script(
        said.nodes,
        said.devices // said.nodes,
        "pretrain_gpt.py",
        flags,
        before=before,
        launcher=launcher,
        runner="deepspeed",
    )


def lost(design: Design) -> tuple[Line, ...]:
    """What is not of the layout, and is DeepSpeed's own affair or the user's to add."""
    nodes = meaning(design).nodes
    lines = [
        ("text and tokenizer", "job.data", "--data-path and the flags of the tokenizer are yours to add"),
        ("hosts", f"{nodes} nodes", "a hostfile that names them is yours to add"),
        *lost_to_flags(design, verify="never", non_finite="counted, and taken as any other; those of fp16 are skipped"),
        *lost_balance(design, peer="none; another --moe-loss-coeff is yours to set"),
    ]
    if nodes > 1:
        place = "written where the script is started, which has to be a folder that all nodes see"
        lines.append(("ds_config.json", "on every node", place))
    if design.job.compile is not Switch.OFF:
        lines.append(("compile", design.job.compile.value, "off"))
    return lost_lines(lines)


def nearest(design: Design) -> Meaning:
    """Its rotary frequencies are never stretched, and its loss that balances counts first choices alone."""
    said = meaning(design)
    routing = said.model.routing.replace(" of every sequence", " of every microbatch's first choices")
    return replace(said, model=replace(said.model, scaling="none", routing=routing))


def refuse(said: Columns) -> Refusals:
    """What DeepSpeed cannot say of each row."""
    found, shape = Refusals(PEER), said.sizes
    refuse_everywhere(said, found)
    refuse_odd_model(said, found)
    refuse_uneven_vocabulary(said, found)
    refuse_copied_heads(said, found, why="it asserts that tensor ranks divide them")
    found.when(bool(shape.latent), "model", "latent attention")
    found.when(shape.qk_norm and not shape.latent, "model", "norms of queries and keys")
    found.when(shape.qkv_bias != shape.bias, "model", "biases of queries, keys and values alone")
    square = not shape.latent and shape.head_dim * shape.heads != shape.width
    found.when(square, "model", f"{shape.heads} heads of {shape.head_dim} in a width of {shape.width}")
    _refuse_pipeline(said, found)
    refuse_activation(shape, found)
    _refuse_states(said, found)
    _refuse_ranks(said, found)
    where, what = "plan.stages[*].groups[*].precision", f"{said.word('precision')} products"
    found.when(~said.among("precision", *PRECISIONS), where, what, fix="choose bf16, fp16 or fp32")
    what = f"gradients reduced in {said.word('gradient_precision')}"
    found.when(~said.among("gradient_precision", *_REDUCED), "plan.gradients.precision", what, fix="fp32")
    wsd = said.job.learning_rate.decay is Decay.WSD
    found.when(wsd, "job.learning_rate.decay", "a rate that stays and then decays", fix="choose cosine or constant")
    if said.has_experts:
        _refuse_experts(said, found)
    return found


def _refuse_pipeline(said: Columns, found: Refusals) -> None:
    where, zero_bubble = "plan.schedule.kind", said.among("schedule", ScheduleKind.ZERO_BUBBLE_H1)
    bubbles = zero_bubble & (said.table.sequence_parallel == 0) & (said.table.pipeline > 1)
    known = said.among("schedule", ScheduleKind.ONE_F_ONE_B) | bubbles
    why = "its zero bubble is not for sequence parallel" if zero_bubble[0] else ""
    found.when(~known, where, f"the {said.word('schedule')} schedule", why=why, fix="choose 1f1b")
    layers = said.sizes.layers
    why = "Megatron-DeepSpeed deals transformer layers to stages itself, evenly"
    dealt = said.of_layouts(
        lambda layout: (
            layers % layout.pipeline == 0
            and layout.ranks == tuple(range(layout.pipeline))
            and layout.bounds[:-1] == dealt_stages(layers, layout.pipeline)
        )
    )
    found.when(~dealt, "plan.stages", "stages of these layers", why=why, fix="give every stage as many layers")


def dealt_stages(layers: int, pipeline: int) -> tuple[int, ...]:
    """The first block of every stage as Megatron-DeepSpeed deals layers, which come after the embedding."""
    return tuple(rank * layers // pipeline + (rank > 0) for rank in range(pipeline))


def _refuse_states(said: Columns, found: Refusals) -> None:
    groups, kind, table = "plan.stages[*].groups[*]", said.word("sharding"), said.table
    none = said.among("sharding", Sharding.NONE)
    deep = said.among("sharding", Sharding.GRADIENTS, Sharding.PARAMETERS) & (table.pipeline > 1)
    why = "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"
    found.when(deep, f"{groups}.sharding", f"{kind} with a pipeline", why=why, fix="choose zero1, or pipeline 1")
    why = "ZeRO divides over every data rank, and Megatron-DeepSpeed does not start MiCS"
    found.when(~none & (table.replicate > 1), "plan.axes", "replicas of shards", why=why, fix="choose replicate 1")
    where = f"{groups}.recompute"
    found.when(said.mixes(0), where, "recompute that differs between layers", fix="choose one for all")
    where = f"{groups}.offload"
    found.when(said.mixes(1), where, "offload that differs between layers", fix="choose one for all")
    whole = said.uses("offload", Offload.PARAMETERS)
    found.when(whole, where, "parameters in the host's memory", fix="choose none or optimizer")
    bare = said.uses("offload", Offload.OPTIMIZER) & none
    found.when(bare, where, "offload of optimizer state that is not sharded", fix="choose zero1, zero2 or zero3")
    again = said.uses("recompute", Recompute.FULL) & ~said.uses("recompute", Recompute.NONE, Recompute.SELECTIVE)
    kept = said.uses("offload", Offload.ACTIVATIONS) & ~again
    why = "cpu_checkpointing moves the inputs of recomputed layers alone"
    found.when(kept, where, "activations in the host's memory", why=why, fix="choose none, or full recompute")


def _refuse_ranks(said: Columns, found: Refusals) -> None:
    table = said.table
    traded = (table.context == 1) | (table.inner == table.context)
    why, fix = "DeepSpeed-Ulysses trades tokens for heads over the whole axis", f"choose inner {said.number('context')}"
    found.when(~traded, "plan.exchange", f"{said.word('exchange')} of keys and values", why=why, fix=fix)
    # Ranks that trade over the whole axis do equal work whichever of the two they hold.
    refuse_layout(said, found, TokenLayout.ZIGZAG, TokenLayout.CONTIGUOUS)
    beside = (table.context > 1) & (table.tensor * table.pipeline > 1)
    why = "its sequence parallel does not work with tensor parallel or pipeline parallel"
    found.when(beside, "plan.axes", "context ranks beside tensor or pipeline ranks", why=why, fix="choose context 1")


def _refuse_experts(said: Columns, found: Refusals) -> None:
    table, shape = said.table, said.sizes
    found.when(table.pipeline > 1, "plan.axes", "experts under a pipeline", fix="choose pipeline 1")
    third = said.among("sharding", Sharding.PARAMETERS)
    found.when(third, "plan.stages[*].groups[*].sharding", "zero3 of experts")
    found.when(not all(shape.with_experts), "model", "experts on some layers and not on others")
    found.when(shape.mixture[3] > 0, "model", "experts that every token takes")
    found.when(shape.mixture[1] > 2, "model", f"{shape.mixture[1]} experts a token", why="its gate chooses 1 or 2")
    _refuse_routing(said, found)
    what = f"experts divided by {said.number('expert_tensor')} beside tensor {said.number('tensor')}"
    found.when(said.expert_tensor != table.tensor, "plan.experts.tensor", what)
    wide = (table.data % said.expert != 0) | ((table.context > 1) & (said.expert > 1))
    what = f"{said.number('expert')} ranks of experts in {int(table.data[0])} data ranks"
    found.when(wide, "plan.experts.expert", what)


def _refuse_routing(said: Columns, found: Refusals) -> None:
    """Its gates are a softmax over all experts: one expert weighs by its score, two by their parts of the sum."""
    usual = Routing(weighing=Weighing.NORMALIZED if said.sizes.mixture[1] == 2 else Weighing.SCORE)
    routed = {layer.transform.routing for layer in said.model.layers if isinstance(layer.transform, Mixture)}
    odd = any(replace(routing, balance_loss=0.0) != usual for routing in routed)
    fix = f"choose {usual.score} and {usual.weighing} without groups, scale and bias_rate"
    found.when(odd, "model.layers[*].transform.routing", "experts that are chosen or weighed so", fix=fix)


def _routing(design: Design) -> Routing:
    return next(layer.transform.routing for layer in design.model.layers if isinstance(layer.transform, Mixture))


def _config(said: Meaning) -> dict[str, Any]:
    """ds_config.json; what is True or False here is DeepSpeed's default, said so that it is seen."""
    zero: dict[str, Any] = {"stage": _STAGES[said.sharding], "overlap_comm": True}
    if Offload.OPTIMIZER in said.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": said.batch,
        "train_micro_batch_size_per_gpu": said.microbatch,
        "gradient_accumulation_steps": said.microbatches,
        "zero_optimization": zero,
        "bf16": {"enabled": said.precision is Precision.BF16},
        "fp16": {"enabled": said.precision is Precision.FP16},
        "communication_data_type": _REDUCED[said.gradients],
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if said.optimizer.clip_norm is not None:
        config["gradient_clipping"] = said.optimizer.clip_norm
    if Recompute.FULL in said.recompute:
        config["activation_checkpointing"] = {"cpu_checkpointing": Offload.ACTIVATIONS in said.offload}
    return config


def _layout(said: Meaning) -> list[Flag]:
    flags: list[Flag] = [
        ("--tensor-model-parallel-size", said.tensor),
        ("--pipeline-model-parallel-size", said.pipeline),
        ("--ds-sequence-parallel-size", said.context),
        ("--seq-length", said.sequence_length),
        ("--max-position-embeddings", max(said.sequence_length, said.model.positions)),
        ("--micro-batch-size", said.microbatch),
        ("--global-batch-size", said.batch),
    ]
    flags += [("--no-pipeline-parallel",)] if said.pipeline == 1 else []
    flags += [("--sequence-parallel",)] if said.sequence_parallel else []
    flags += [("--enable-zbh1-pipeline",)] if said.schedule is ScheduleKind.ZERO_BUBBLE_H1 else []
    if Recompute.FULL in said.recompute:
        flags += [("--recompute-granularity", "full"), ("--recompute-method", "uniform"), ("--recompute-num-layers", 1)]
        flags += [("--deepspeed-activation-checkpointing",)]
        flags += [("--checkpoint-in-cpu",)] if Offload.ACTIVATIONS in said.offload else []
    elif Recompute.SELECTIVE in said.recompute:
        flags += [("--recompute-granularity", "selective")]
    flags += [("--cpu-optimizer",)] if Offload.OPTIMIZER in said.offload else []
    flags += [(f"--{said.precision.value}",)] if said.precision is not Precision.FP32 else []
    if said.expert_grid:
        expert, tensor = said.expert_grid
        flags += [("--moe-expert-parallel-size", expert)]
        flags += [("--enable-expert-tensor-parallelism",)] if tensor > 1 else []
    return flags


def _model(said: Meaning, design: Design) -> list[Flag]:
    shape = said.model
    flags = size_flags(shape, deviation=design.model.initializer_range)
    flags += [("--num-key-value-heads", shape.kv_heads)]
    flags += [("--normalization", "rmsnorm" if shape.norm == "rms" else "layernorm")]
    flags += [("--layernorm-epsilon", shape.norm_epsilon)]
    if shape.theta:
        flags += [("--use-rotary-position-embeddings",), ("--rotary-position-embeddings-theta", int(shape.theta))]
    elif not shape.positions:
        flags += [("--no-position-embedding",)]
    if shape.mixture:
        flags += [("--num-experts", shape.mixture[0]), ("--topk", shape.mixture[1]), ("--expert-interval", 1)]
        flags += [("--moe-loss-coeff", _routing(design).balance_loss), ("--disable-moe-token-dropping",)]
        flags += [("--disable-moe-top2-2nd-expert-sampling",)] if shape.mixture[1] == 2 else []
    return flags
