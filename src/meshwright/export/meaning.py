"""Meaning: a plan in words that every peer's flags can be read back into; the common ground of the check."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.spec.cluster import Precision
from meshwright.spec.exchange import ExchangeKind
from meshwright.spec.job import Decay
from meshwright.spec.model import Attention, FeedForward, LatentAttention, Mixture, ModelSpec, QueryKeyNorm
from meshwright.spec.optimizer import OptimizerKind, OptimizerSpec, as_kind
from meshwright.spec.plan import BlockGroup, Design, Offload, Plan, Recompute, ScheduleKind, Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A model as trainers' flags say it: one shape of layer, some of the layers with experts.

    `latent` is (query rank or 0, key-value rank, nope, rope, value) of latent attention; `feed_forward` is 0 where
    every layer has experts; `positions` counts learned ones and `theta` is the base of rotary ones; `mixture` is
    (experts, chosen, hidden, shared hidden); `with_experts` says which layers.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How weights move: AdamW, its schedule and how many steps there are; `warmup` and `decay_steps` (of wsd) in
    steps. A rate that stays constant ends at all of it."""

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

    `expert_grid` is (expert, tensor) for a model with experts and () for one without. `recompute` and `offload` have
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
    model: Sizes
    optimizer: Steps


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
        qk_norm=bool(plain and plain.qk_norm is QueryKeyNorm.HEAD),
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
    )


def _theta(mixer: Attention | LatentAttention | None) -> float:
    return mixer.rotary.theta if mixer and mixer.rotary else 0.0


def oddities(model: ModelSpec) -> tuple[str, ...]:
    """What of `model` Sizes does not say, so that no flags made from Sizes would build it; () when they would."""
    found: dict[str, None] = {}
    for layer in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, LatentAttention):
            found |= dict.fromkeys(["sparse attention"] if mixer.indexer else [])
        elif isinstance(mixer, Attention):
            named = {
                "window": "attention windows",
                "chunk": "chunked attention",
                "sinks": "attention sinks",
                "softcap": "soft caps",
                "scale": "its own scale of scores",
                "shared_key_value": "keys used as values",
                "value_norm": "norms of values",
                "gated": "gates on what attention gives",
                "post_norm": "norms after a part",
            }
            found |= dict.fromkeys(words for field, words in named.items() if getattr(mixer, field))
            found |= dict.fromkeys([] if mixer.causal else ["attention that sees later tokens"])
            if mixer.rotary and mixer.rotary.planes is not None:
                found["rotary positions on some planes alone"] = None
            if mixer.qk_norm in (QueryKeyNorm.FULL, QueryKeyNorm.UNSCALED):
                found["norms over all heads at once"] = None
        else:
            found["layers without attention"] = None
        part = layer.transform
        if isinstance(part, Mixture) and (part.inner_norms or part.expert_scale or part.router_scale != 1.0):
            found["norms and scales of a router"] = None
        found |= dict.fromkeys(["dense branches beside experts"] if layer.dense else [])
        found |= dict.fromkeys(["layers that are scaled"] if layer.scaled else [])
        found |= dict.fromkeys(["matrices of a lower rank"] if layer.ranks else [])
        if not isinstance(layer.transform, (FeedForward, Mixture)):
            found["layers without a feed-forward"] = None
    if len({layer.mixer for layer in model.layers}) > 1:
        found["attention that differs between layers"] = None
    for kind in (FeedForward, Mixture):
        if len({layer.transform for layer in model.layers if isinstance(layer.transform, kind)}) > 1:
            found["feed-forwards that differ between layers"] = None
    shape = sizes(model)
    biases = {
        shape.bias,
        *(part.bias for part in (layer.transform for layer in model.layers) if isinstance(part, FeedForward)),
    }
    found |= dict.fromkeys(
        ["biases in some products"] if len(biases) > 1 or (shape.bias and not shape.qkv_bias) else []
    )
    found |= dict.fromkeys(["embeddings that are scaled"] if model.embedding.scale != 1.0 else [])
    found |= dict.fromkeys(["encoders beside the decoder"] if model.towers else [])
    found |= dict.fromkeys(["a soft cap on logits"] if model.head.softcap else [])
    return tuple(found)


def _group_of_layers(design: Design) -> tuple[BlockGroup, ...]:
    """The group that holds each layer, in order: block 0 embeds and the last block is the head."""
    groups = [group for group in design.plan.groups for _ in range(group.start, group.stop)]
    return tuple(groups[1:-1])


def _expert_grid(plan: Plan, model: ModelSpec) -> tuple[int, ...]:
    if not any(isinstance(layer.transform, Mixture) for layer in model.layers):
        return ()
    return (plan.experts.expert, plan.experts.tensor) if plan.experts else (1, plan.tensor)


def _schedule(plan: Plan) -> ScheduleKind:
    alone = plan.pipeline == 1 and plan.schedule.chunks == 1 and plan.schedule.slices == 1
    return ScheduleKind.ONE_F_ONE_B if alone else plan.schedule.kind


def _steps(design: Design) -> Steps:
    job = design.job
    steps = max(1, math.ceil(job.total_tokens / job.batch_tokens))
    asked, rate = as_kind(job.optimizer, OptimizerKind.ADAMW), job.learning_rate
    assert isinstance(asked, OptimizerSpec), "others are refused, by the plan that is told"
    return Steps(
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
