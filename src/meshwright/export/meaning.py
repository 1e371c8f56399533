"""Meaning: a plan in words that every peer's flags can be read back into; the common ground of the check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.spec.cluster import Precision
from meshwright.spec.exchange import ExchangeKind
from meshwright.spec.job import Decay
from meshwright.spec.model import (
    Attention,
    FeedForward,
    LatentAttention,
    Mixture,
    ModelSpec,
    QueryKeyNorm,
)
from meshwright.spec.optimizer import OptimizerKind, OptimizerSpec, as_kind
from meshwright.spec.plan import BlockGroup, Design, Dispatch, Offload, Plan, Recompute, ScheduleKind, Sharding
from meshwright.spec.positions import RotaryScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A model as trainers' flags say it: one shape of layer, some of the layers with experts.

    `latent` is (query rank or 0, key-value rank, nope, rope, value) of latent attention; `feed_forward` is 0 where
    every layer has experts; `positions` counts learned ones and `theta` is the base of rotary ones; `mixture` is
    (experts, chosen, hidden, shared hidden); `with_experts` says which layers. `score_scale` is what latent attention
    multiplies its scores by; `scaling` and `routing` are in words, as of `scaling_words` and `routing_words`, and so is
    `first_weights`, what they are drawn from: matrices from a normal distribution, those that write to the residual
    stream divided by sqrt(2 layers), unless a trainer has its own.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int
    tied: bool
    gated: bool
    activation: str
    norm: str
    positions: int = 0
    theta: float = 0.0
    qk_norm: bool = False
    bias: bool = False
    qkv_bias: bool = False
    latent: tuple[int, ...] = ()
    mixture: tuple[int, ...] = ()
    with_experts: tuple[bool, ...] = ()
    norm_epsilon: float = 1e-5
    scaling: str = "none"
    score_scale: float = 0.0
    routing: str = "none"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    first_weights: str = "its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How weights move: by `kind`, its schedule and how many steps there are; `warmup` and `decay_steps` (of wsd) in
    steps. A rate that stays constant ends at all of it."""

    kind: str
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip_norm: float | None
    decay: str
    warmup: int
    decay_steps: int
    final_fraction: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What launch flags must say for a run to be the plan. Batches in sequences; stages as (rank, start, stop) blocks.

    `expert_grid` is (expert, tensor) for a model with experts and () for one without, `dispatch` how tokens reach them.
    `seed` counts from 0, whatever the trainer's own lowest is. `recompute` and `offload` have
    a word for every layer. What leaves no trace is written in one way: one pipeline rank with one stage runs 1f1b.
    """

    devices: int
    nodes: int
    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int
    sequence_parallel: bool
    sharding: Sharding
    exchange: str
    expert_grid: tuple[int, ...]
    dispatch: str
    stages: tuple[tuple[int, int, int], ...]
    schedule: ScheduleKind
    chunks: int
    slices: int
    sequence_length: int
    microbatch: int
    microbatches: int
    batch: int
    recompute: tuple[Recompute, ...]
    offload: tuple[Offload, ...]
    precision: Precision
    gradients: Precision
    seed: int | None
    model: Sizes
    optimizer: Steps


def scaling_words(kind: str, factor: float, *, low: float, high: float, trained: int, gain: float = 1.0) -> str:
    """`llama3 by 8, 1 to 4 of 8192`, and of yarn what cosines and sines are multiplied by; `none` for a factor of 1."""
    if factor == 1.0:
        return "none"
    tail = f", gain {gain:.6g}" if kind == "yarn" else ""
    return f"{kind} by {factor:g}, {low:g} to {high:g} of {trained}{tail}"


def routing_words(
    score: str,
    *,
    weighing: str,
    scale: float,
    groups: int,
    chosen: int,
    bias_rate: float,
    balance: Mapping[str, float],
) -> str:
    """`sigmoid, normalized x 2.5, 4 of 8 groups, bias 0.001`; what changes nothing is left out. `balance` is the weight
    of each loss that balances, by what it balances."""
    words = [score, f"{weighing} x {scale:g}"]
    words += [f"{chosen} of {groups} groups"] if groups > 1 else []
    words += [f"bias {bias_rate:g}"] if bias_rate else []
    words += [f"loss {weight:g} of every {part}" for part, weight in balance.items() if weight]
    return ", ".join(words)


def deviation_words(deviation: float) -> str:
    """`deviation 0.02`, of first weights."""
    return f"deviation {deviation:g}"


def exchange_words(kind: ExchangeKind, *, inner: int, context: int) -> str:
    """`none`, `ring`, `gather`, `all-to-all`, or `all-to-all 4 in ring 2`."""
    if context == 1:
        return "none"
    if inner <= 1:
        return kind.value
    outer = context // inner
    return "all-to-all" if outer == 1 else f"all-to-all {inner} in {kind.value} {outer}"


def meaning(design: Design) -> Meaning:
    """What `design` says; of a model that `oddities` finds fault with, as much as Sizes can hold."""
    plan, group = design.plan, design.plan.first_group
    per_node = design.cluster.groups[0].devices_per_node
    return Meaning(
        devices=plan.world_size,
        nodes=-(-plan.world_size // per_node),
        pipeline=plan.pipeline,
        replicate=plan.replicate,
        shard=plan.shard,
        context=plan.context,
        tensor=plan.tensor,
        sequence_parallel=group.sequence_parallel,
        sharding=group.sharding,
        exchange=exchange_words(plan.exchange.kind, inner=plan.exchange.inner, context=plan.context),
        expert_grid=_expert_grid(plan, design.model),
        dispatch=_dispatch(plan, design.model),
        stages=tuple((stage.rank, stage.start, stage.stop) for stage in plan.stages),
        schedule=_schedule(plan),
        chunks=plan.schedule.chunks,
        slices=plan.schedule.slices,
        sequence_length=plan.sequence_length,
        microbatch=plan.microbatch,
        microbatches=plan.schedule.microbatches,
        batch=plan.batch,
        recompute=tuple(group.recompute for group in _group_of_layers(design)),
        offload=tuple(group.offload for group in _group_of_layers(design)),
        precision=group.precision,
        gradients=plan.gradients.precision,
        seed=design.job.seed,
        model=sizes(design.model),
        optimizer=_steps(design),
    )


def sizes(model: ModelSpec) -> Sizes:
    """The shape of the first layer that has each part, and which layers have experts."""
    mixers = [layer.mixer for layer in model.layers]
    transforms = [layer.transform for layer in model.layers]
    plain = next((mixer for mixer in mixers if isinstance(mixer, Attention)), None)
    latent = next((mixer for mixer in mixers if isinstance(mixer, LatentAttention)), None)
    dense = next((part for part in transforms if isinstance(part, FeedForward)), None)
    experts = next((part for part in transforms if isinstance(part, Mixture)), None)
    heads = plain.heads if plain else latent.heads if latent else 0
    norm = model.head.norm
    shown = dense or experts
    return Sizes(
        layers=len(model.layers),
        width=model.width,
        heads=heads,
        kv_heads=plain.kv_heads if plain else heads,
        head_dim=plain.head_dim if plain else 0,
        feed_forward=dense.hidden if dense else 0,
        vocab=model.vocab,
        tied=model.head.tied,
        gated=shown.gated if shown else False,
        activation=shown.activation.value if shown else "none",
        norm=norm.kind.value if norm else "none",
        positions=model.embedding.positions,
        theta=_theta(plain or latent),
        qk_norm=latent is not None or bool(plain and plain.qk_norm is QueryKeyNorm.HEAD),
        bias=bool(plain and plain.output_bias),
        qkv_bias=bool(plain and plain.qkv_bias),
        latent=(
            (latent.query_rank or 0, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim)
            if latent
            else ()
        ),
        mixture=(
            (experts.experts, experts.top_k, experts.hidden, experts.shared.hidden if experts.shared else 0)
            if experts
            else ()
        ),
        with_experts=tuple(isinstance(part, Mixture) for part in transforms) if experts else (),
        norm_epsilon=norm.eps if norm else 1e-5,
        scaling=_scaling(rotary_scaling(model)),
        score_scale=round(latent.scale or (latent.nope_dim + latent.rope_dim) ** -0.5, 9) if latent else 0.0,
        routing=_routing(experts) if experts else "none",
        first_weights=deviation_words(model.initializer_range),
    )


def _theta(mixer: Attention | LatentAttention | None) -> float:
    return mixer.rotary.theta if mixer and mixer.rotary else 0.0


def rotary_scaling(model: ModelSpec) -> RotaryScaling | None:
    """How the first layer that attends stretches its rotary frequencies; None where it does not."""
    mixers = [layer.mixer for layer in model.layers]
    rotary = next((mixer.rotary for mixer in mixers if isinstance(mixer, (Attention, LatentAttention))), None)
    return rotary.scaling if rotary else None


def yarn_score_scale(shape: Sizes, factor: float) -> float:
    """What latent attention multiplies scores by where YaRN by `factor` sharpens them (2405.04434)."""
    gain = 0.1 * math.log(factor) + 1.0
    return round(gain * gain / math.sqrt(shape.latent[2] + shape.latent[3]), 9) if shape.latent else 0.0


def _scaling(said: RotaryScaling | None) -> str:
    if said is None:
        return "none"
    gain = 0.1 * math.log(said.factor) + 1.0 if said.gain is None else said.gain
    low, high, trained = said.low_frequency, said.high_frequency, said.trained_positions
    return scaling_words(said.kind, said.factor, low=low, high=high, trained=trained, gain=gain)


def _routing(experts: Mixture) -> str:
    said = experts.routing
    return routing_words(
        said.score.value,
        weighing=said.weighing.value,
        scale=said.scale,
        groups=said.groups,
        chosen=said.chosen_groups,
        bias_rate=said.bias_rate,
        balance={"sequence": said.balance_loss},
    )


def _group_of_layers(design: Design) -> tuple[BlockGroup, ...]:
    """The group that holds each layer, in order: block 0 embeds and the last block is the head."""
    groups = [group for group in design.plan.groups for _ in range(group.start, group.stop)]
    return tuple(groups[1:-1])


def _expert_grid(plan: Plan, model: ModelSpec) -> tuple[int, ...]:
    if not any(isinstance(layer.transform, Mixture) for layer in model.layers):
        return ()
    return (plan.experts.expert, plan.experts.tensor) if plan.experts else (1, plan.tensor)


def _dispatch(plan: Plan, model: ModelSpec) -> str:
    if not any(isinstance(layer.transform, Mixture) for layer in model.layers):
        return "none"
    return plan.experts.dispatch.value if plan.experts else Dispatch.ALL_TO_ALL.value


def _schedule(plan: Plan) -> ScheduleKind:
    alone = plan.pipeline == 1 and plan.schedule.chunks == 1 and plan.schedule.slices == 1
    return ScheduleKind.ONE_F_ONE_B if alone else plan.schedule.kind


def _steps(design: Design) -> Steps:
    job = design.job
    steps = max(1, math.ceil(job.total_tokens / job.batch_tokens))
    asked, rate = as_kind(job.optimizer, OptimizerKind.ADAMW), job.learning_rate
    assert isinstance(asked, OptimizerSpec), "others are refused, by the plan that is told"
    return Steps(
        kind=asked.kind,
        learning_rate=asked.learning_rate,
        beta1=asked.beta1,
        beta2=asked.beta2,
        epsilon=asked.epsilon,
        weight_decay=asked.weight_decay,
        clip_norm=asked.clip_norm,
        decay=job.learning_rate.decay.value,
        warmup=min(rate.warmup_steps or round(rate.warmup_fraction * steps), steps),
        decay_steps=max(1, round(rate.decay_fraction * steps)) if rate.decay is Decay.WSD else 0,
        final_fraction=1.0 if rate.decay is Decay.CONSTANT else rate.final_fraction,
        steps=steps,
    )
