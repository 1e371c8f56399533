"""A plan as flags of Megatron-LM's pretrain_gpt.py (Megatron Core 0.19), with the torchrun line that starts it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.layout import Layout
from meshwright.cost.table import RECOMPUTES
from meshwright.export.columns import Columns
from meshwright.export.compare import Line
from meshwright.export.lost import lost_balance, lost_lines
from meshwright.export.meaning import Meaning, meaning, rotary_scaling, scaling_words, yarn_score_scale
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
from meshwright.spec.exchange import ExchangeKind, TokenLayout
from meshwright.spec.job import Switch
from meshwright.spec.model import Mixture
from meshwright.spec.plan import Design, Offload, Recompute, ScheduleKind, Sharding
from meshwright.spec.routing import Score, Weighing

PEER = "Megatron-LM"
_SCHEDULES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)
_PRECISIONS: dict[Precision, tuple[Flag, ...]] = {
    Precision.FP32: (),
    Precision.BF16: (("--bf16",),),
    Precision.FP16: (("--fp16",),),
    Precision.FP8: (("--bf16",), ("--fp8-format", "hybrid"), ("--fp8-recipe", "tensorwise")),
    Precision.FP8_BLOCK: (("--bf16",), ("--fp8-format", "e4m3"), ("--fp8-recipe", "blockwise")),
    Precision.MXFP8: (("--bf16",), ("--fp8-format", "e4m3"), ("--fp8-recipe", "mxfp8")),
    Precision.NVFP4: (("--bf16",), ("--fp4-format", "e2m1"), ("--fp4-recipe", "nvfp4")),
}
PRECISIONS = tuple(_PRECISIONS)


def write(design: Design) -> str:
    """The script that starts the plan. Raises NotExpressible with everything that Megatron-LM cannot say."""
    said = meaning(design)
    refuse_all(design, refuse, peer=PEER)
    flags = [
        *_degrees(said, design),
        *_stages(said),
        *_batches(said),
        *_states(said),
        *_recompute(said),
        *_PRECISIONS[said.precision],
        *_gradients(said),
        *_model(said, design),
        *_optimizer(said, design),
    ]
    per_node = said.devices // said.nodes
    fsdp = said.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS)
    before = () if fsdp else ("export CUDA_DEVICE_MAX_CONNECTIONS=1",)
    return launch_script(said.nodes, per_node, "pretrain_gpt.py", flags, before=before)


def lost(design: Design) -> tuple[Line, ...]:
    """What is not of the layout, and is Megatron-LM's own affair or the user's to add."""
    verify = "never; --check-weight-hash-across-dp-replicas-interval is yours to add"
    balance = "--moe-router-load-balancing-type and --moe-aux-loss-coeff"
    lines = [
        ("text and tokenizer", "job.data", "--data-path, --tokenizer-type and --tokenizer-model are yours to add"),
        *lost_to_flags(design, verify=verify, non_finite="a loss that is no number ends the run, and nothing is saved"),
        *lost_balance(design, peer=f"none; {balance} are yours to add"),
    ]
    if design.job.compile is not Switch.OFF:
        lines.append(("compile", design.job.compile.value, "its own fused kernels instead"))
    return lost_lines(lines)


def nearest(design: Design) -> Meaning:
    """Latent attention stretches by its own bounds, of which no flag names others."""
    said, scaling = meaning(design), rotary_scaling(design.model)
    if scaling is None or not said.model.latent:
        return said
    bounds = scaling_words("yarn", scaling.factor, low=1.0, high=32.0, trained=4096)
    return replace(said, model=replace(said.model, scaling=bounds))


def refuse(said: Columns) -> Refusals:
    """What Megatron-LM cannot say of each row."""
    found, table = Refusals(PEER), said.table
    refuse_everywhere(said, found)
    refuse_odd_model(said, found)
    refuse_uneven_vocabulary(said, found)
    why = "it divides rows of the projections evenly and gathers what all ranks make of them, or does not start"
    refuse_copied_heads(said, found, why=why)
    where, what = "plan.schedule.kind", f"the {said.word('schedule')} schedule"
    found.when(~said.among("schedule", *_SCHEDULES), where, what, fix="choose 1f1b or interleaved")
    looped = said.of_layouts(lambda layout: all(rank == at % layout.pipeline for at, rank in enumerate(layout.ranks)))
    found.when(~looped, "plan.stages", "stages that are not dealt to ranks in turn", fix="choose rank s % pipeline")
    where, what = "plan.stages[*].groups[*].precision", f"{said.word('precision')} products"
    found.when(~said.among("precision", *PRECISIONS), where, what, fix="choose bf16")
    full, half = said.among("precision", Precision.FP32), said.among("precision", Precision.FP16)
    same = np.where(half, said.among("gradient_precision", Precision.FP16), False)
    same |= ~full & ~half & said.among("gradient_precision", Precision.BF16)
    reduced = said.among("gradient_precision", Precision.FP32) | same
    what = f"gradients reduced in {said.word('gradient_precision')}"
    found.when(~reduced, "plan.gradients.precision", what, fix="fp32")
    refuse_activation(said.sizes, found)
    _refuse_states(said, found)
    both = (table.inner > 1) & (table.inner < table.context)
    fix = "choose ring, or trade heads over the whole axis"
    mixed = both & said.among("exchange", ExchangeKind.GATHER)
    found.when(mixed, "plan.exchange", "all-to-all inside a gather", fix=fix)
    refuse_layout(said, found, TokenLayout.ZIGZAG)
    where = "plan.stages[*].groups[*].recompute"
    strange = said.of_layouts(lambda layout: bool(layout.policies) and _first_layers(layout) is None)
    found.when(strange, where, "this mixture of recompute", fix="give all layers one choice")
    apart = (table.tensor > 1) & (table.sequence_parallel == 0) & said.has_experts
    what = "experts beside tensor ranks that are not sequence parallel"
    found.when(apart, "plan.stages[*].groups[*].sequence_parallel", what, fix="choose sequence parallel, or tensor 1")
    _refuse_model(said, found)
    return found


def _refuse_model(said: Columns, found: Refusals) -> None:
    """Frequencies that its flags do not stretch so, and experts that it does not weigh so."""
    shape, scaling = said.sizes, rotary_scaling(said.model)
    if scaling is not None and not shape.latent:
        known = scaling_words("llama3", scaling.factor, low=1.0, high=4.0, trained=8192)
        odd = shape.scaling != known
        found.when(odd, "model", f"rotary frequencies stretched as {shape.scaling}", why=f"it knows {known} alone")
    strange = scaling is not None and bool(shape.latent) and scaling.kind != "yarn"
    found.when(strange, "model", f"rotary frequencies of latent attention stretched as {shape.scaling}")
    usual = yarn_score_scale(shape, 1.0 if scaling is None else scaling.factor)
    strange = bool(shape.latent) and shape.score_scale not in (usual, yarn_score_scale(shape, 1.0))
    found.when(strange, "model", f"scores of latent attention times {shape.score_scale:g}")
    routed = [layer.transform.routing for layer in said.model.layers if isinstance(layer.transform, Mixture)]
    where = "model.layers[*].transform.routing"
    inward = any(routing.weighing is not Weighing.NORMALIZED for routing in routed)
    found.when(inward, where, "experts that are weighed otherwise than in their sum")
    biased = any(routing.bias_rate and routing.score is not Score.SIGMOID for routing in routed)
    why = "--moe-router-enable-expert-bias is for sigmoid scores"
    found.when(biased, where, "a bias that balances a softmax", why=why, fix="choose balance_loss, or score sigmoid")


def _refuse_states(said: Columns, found: Refusals) -> None:
    where = "plan.stages[*].groups[*].sharding"
    full = said.among("sharding", Sharding.GRADIENTS, Sharding.PARAMETERS)
    what = f"{said.word('sharding')} with a pipeline"
    why = "its sharding of gradients and parameters is FSDP, documented beside tensor, context and expert ranks alone"
    found.when(full & (said.table.pipeline > 1), where, what, why=why, fix="choose zero1, or pipeline 1")
    where = "plan.stages[*].groups[*].offload"
    kept = said.uses("offload", Offload.ACTIVATIONS)
    why = "--cpu-offloading-num-layers must leave a layer out, and fine-grained offload names modules"
    found.when(kept, where, "every activation in the host's memory", why=why, fix="choose none")
    whole = said.uses("offload", Offload.PARAMETERS)
    found.when(whole, where, "parameters in the host's memory", fix="choose none or optimizer")
    what = "optimizer state of some blocks in the host's memory"
    found.when(said.mixes(1) & ~kept, where, what, fix="choose one for all")
    alone = said.uses("offload", Offload.OPTIMIZER) & said.among("sharding", Sharding.NONE)
    why = "--optimizer-cpu-offload needs --use-precision-aware-optimizer, which needs --use-distributed-optimizer"
    found.when(alone, where, "offload of optimizer state that is not sharded", why=why, fix="choose zero1")


def _degrees(said: Meaning, design: Design) -> list[Flag]:
    flags: list[Flag] = [
        ("--tensor-model-parallel-size", said.tensor),
        ("--pipeline-model-parallel-size", said.pipeline),
        ("--context-parallel-size", said.context),
    ]
    if said.sequence_parallel:
        flags.append(("--sequence-parallel",))
    inner, context = design.plan.exchange.inner, said.context
    if context > 1 and inner == context:
        flags.append(("--cp-comm-type", "a2a"))
    elif context > 1 and inner > 1:
        flags.append(("--cp-comm-type", "a2a+p2p"))
        flags.append(("--hierarchical-context-parallel-sizes", inner, context // inner))
    elif context > 1:
        flags.append(("--cp-comm-type", "p2p" if design.plan.exchange.kind is ExchangeKind.RING else "all_gather"))
    if said.expert_grid:
        expert, tensor = said.expert_grid
        flags.append(("--expert-model-parallel-size", expert))
        flags.append(("--expert-tensor-parallel-size", tensor))
    return flags


def _stages(said: Meaning) -> list[Flag]:
    """Nothing for equal stages, how many a rank holds for equal chunks, else the layout written out."""
    last = said.stages[-1][2] - 1
    held = [stop - start - (start == 0) - (stop == last + 1) for _, start, stop in said.stages]
    ends = said.stages[0][2] > 1 and said.stages[-1][1] < last
    if len(set(held)) == 1 and ends:
        return [("--num-virtual-stages-per-pipeline-rank", said.chunks)] if said.chunks > 1 else []
    words = ["t" if count == 1 else f"t*{count}" if count else "" for count in held]
    words[0], words[-1] = f"E{words[0]}", f"{words[-1]}L"
    return [("--pipeline-model-parallel-layout", "|".join(words))]


def _batches(said: Meaning) -> list[Flag]:
    return [
        ("--seq-length", said.sequence_length),
        ("--max-position-embeddings", max(said.sequence_length, said.model.positions)),
        ("--micro-batch-size", said.microbatch),
        ("--global-batch-size", said.batch),
    ]


def _states(said: Meaning) -> list[Flag]:
    flags: list[Flag] = []
    if said.devices // (said.pipeline * said.tensor) > 1:
        flags.append(("--overlap-grad-reduce",))
    if said.sharding is not Sharding.NONE:
        flags += [("--use-distributed-optimizer",), ("--overlap-param-gather",)]
        if said.replicate > 1:
            flags.append(("--num-distributed-optimizer-instances", said.replicate))
    if said.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS):
        strategy = "optim_grads" if said.sharding is Sharding.GRADIENTS else "optim_grads_params"
        flags += [("--use-megatron-fsdp",), ("--data-parallel-sharding-strategy", strategy)]
        flags += [("--ckpt-format", "fsdp_dtensor"), ("--no-gradient-accumulation-fusion",)]
        # Else every rank builds its whole stage before anything is sharded.
        flags.append(("--init-model-with-meta-device",))
    if Offload.OPTIMIZER in said.offload:
        flags += [("--optimizer-cpu-offload",), ("--use-precision-aware-optimizer",)]
    return flags


def _gradients(said: Meaning) -> list[Flag]:
    """fp16 reduces in its own precision and bf16 in fp32, unless told."""
    if said.precision is Precision.FP16 and said.gradients is Precision.FP32:
        return [("--accumulate-allreduce-grads-in-fp32",)]
    return [("--grad-reduce-in-bf16",)] if said.gradients is Precision.BF16 else []


def _recompute(said: Meaning) -> tuple[Flag, ...]:
    """All layers, none, or the first so many of every stage."""
    kinds = set(said.recompute)
    if kinds == {Recompute.NONE}:
        return ()
    granularity = ("--recompute-granularity", "selective" if Recompute.SELECTIVE in kinds else "full")
    if kinds == {Recompute.SELECTIVE}:
        return (granularity,)
    if kinds == {Recompute.FULL}:
        return granularity, ("--recompute-method", "uniform"), ("--recompute-num-layers", 1)
    first = _first_of(said.recompute, [(start, stop) for _, start, stop in said.stages])
    assert first is not None, "another mixture is refused"
    return granularity, ("--recompute-method", "block"), ("--recompute-num-layers", first)


def _first_layers(layout: Layout) -> int | None:
    """As `_first_of`, of a layout; 0 where all layers have one choice."""
    kinds = tuple(RECOMPUTES[policy[0]] for policy in layout.policies[1:-1])
    if len(set(kinds)) <= 1:
        return 0
    return _first_of(kinds, list(zip(layout.bounds, layout.bounds[1:], strict=False)))


def _first_of(kinds: tuple[Recompute, ...], stages: list[tuple[int, int]]) -> int | None:
    """How many layers are recomputed in full, the first of every stage, and no others; None for other mixtures."""
    if Recompute.SELECTIVE in kinds:
        return None
    firsts = set()
    for start, stop in stages:
        layers = kinds[max(start - 1, 0) : stop - 1]
        first = layers.count(Recompute.FULL)
        if Recompute.NONE in layers[:first]:
            return None
        firsts.add(first)
    return firsts.pop() if len(firsts) == 1 else None


def _model(said: Meaning, design: Design) -> list[Flag]:
    shape = said.model
    flags = size_flags(shape, deviation=design.model.initializer_range)
    flags += [("--normalization", "RMSNorm" if shape.norm == "rms" else "LayerNorm")]
    flags += [("--norm-epsilon", shape.norm_epsilon)]
    flags += [("--add-qkv-bias",)] if shape.qkv_bias and not shape.bias else []
    flags += [("--qk-layernorm",)] if shape.qk_norm else []
    flags += _positions(said, design)
    if shape.latent:
        query, kv, nope, rope, value = shape.latent
        flags += [("--multi-latent-attention",), ("--kv-lora-rank", kv), ("--v-head-dim", value)]
        flags += [("--q-lora-rank", query)] if query else []
        flags += [("--qk-head-dim", nope), ("--qk-pos-emb-head-dim", rope)]
    else:
        flags += [("--kv-channels", shape.head_dim)]
        if shape.kv_heads < shape.heads:
            flags += [("--group-query-attention",), ("--num-query-groups", shape.kv_heads)]
    if shape.mixture:
        experts, chosen, hidden, shared = shape.mixture
        pattern = "".join(f"+[{int(here)}]" for here in shape.with_experts).removeprefix("+")
        flags += [("--num-experts", experts), ("--moe-router-topk", chosen), ("--moe-ffn-hidden-size", hidden)]
        flags += [("--moe-grouped-gemm",), ("--moe-token-dispatcher-type", "alltoall")]
        flags += [("--moe-shared-expert-intermediate-size", shared)] if shared else []
        flags += [] if all(shape.with_experts) else [("--moe-layer-freq", pattern)]
        flags += _routing(design)
    return flags


def _routing(design: Design) -> list[Flag]:
    """Nothing for a softmax over the chosen ones, which is its default; what balances is of each sequence alone."""
    said = next(layer.transform.routing for layer in design.model.layers if isinstance(layer.transform, Mixture))
    flags: list[Flag] = [("--moe-router-load-balancing-type", "seq_aux_loss" if said.balance_loss else "none")]
    flags += [("--moe-aux-loss-coeff", said.balance_loss)] if said.balance_loss else []
    flags += [("--moe-router-score-function", said.score.value)] if said.score is not Score.SOFTMAX else []
    flags += [("--moe-router-topk-scaling-factor", said.scale)] if said.scale != 1.0 else []
    if said.groups > 1:
        flags += [("--moe-router-num-groups", said.groups), ("--moe-router-group-topk", said.chosen_groups)]
    if said.bias_rate:
        flags += [("--moe-router-enable-expert-bias",), ("--moe-router-bias-update-rate", said.bias_rate)]
    return flags


def _positions(said: Meaning, design: Design) -> list[Flag]:
    if said.model.positions:
        return [("--position-embedding-type", "learned_absolute")]
    if not said.model.theta:
        return [("--position-embedding-type", "none")]
    flags: list[Flag] = [("--position-embedding-type", "rope"), ("--rotary-base", int(said.model.theta))]
    scaling = rotary_scaling(design.model)
    if scaling is not None and said.model.latent:
        # The gain of cosines and sines is a quotient of these two, the scale of scores comes of the second.
        both = 0.0 if said.model.score_scale == yarn_score_scale(said.model, 1.0) else 1.0
        flags += [("--rotary-scaling-factor", scaling.factor), ("--mscale", both), ("--mscale-all-dim", both)]
    elif scaling is not None:
        flags += [("--use-rope-scaling",), ("--rope-scaling-factor", scaling.factor)]
    return flags


def _optimizer(said: Meaning, design: Design) -> list[Flag]:
    styles = {"cosine": "cosine", "wsd": "WSD", "constant": "constant"}
    flags = optimizer_flags(said, design, decay=styles[said.optimizer.decay])
    if said.optimizer.decay == "wsd":
        flags += [("--lr-wsd-decay-style", "linear"), ("--lr-wsd-decay-iters", said.optimizer.decay_steps)]
    return flags
