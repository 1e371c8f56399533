"""Blocks of every kind that the runtime builds, and the same blocks as the cost model prices them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from meshwright.cost.block_bytes import BlockBytes, block_bytes
from meshwright.cost.layouts import Kind
from meshwright.cost.operators import block_work
from meshwright.cost.sizes import operator_sizes
from meshwright.cost.stacks import software
from meshwright.cost.table import PRECISIONS, RECOMPUTES, Layout, PlanTable
from meshwright.cost.work import PartWork, Sizes
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.model import (
    Activation,
    Attention,
    Block,
    Choice,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Layer,
    MatrixRank,
    Mixture,
    Norm,
    NormKind,
    QueryKeyNorm,
    Rotary,
    Routing,
    Score,
    Weighing,
)
from meshwright.spec.ranks import factorable
from tests.cost.cost_examples import A100
from tests.cost.saved_tensors import Setting

WIDTH = 64
ROOT, LAYER = Norm(width=WIDTH), Norm(width=WIDTH, kind=NormKind.LAYER)
TURN = Rotary(dims=16)


def attention(**changes: object) -> Layer:
    usual = {"width": WIDTH, "heads": 4, "kv_heads": 2, "head_dim": 16, "norm": ROOT}
    return Layer(mixer=Attention(**(usual | changes)), transform=None)


def latent(**changes: object) -> Layer:
    usual = {"width": WIDTH, "heads": 4, "query_rank": 24, "kv_rank": 16, "rotary": Rotary(dims=8), "norm": ROOT}
    usual |= {"nope_dim": 16, "rope_dim": 8, "value_dim": 16}
    return Layer(mixer=LatentAttention(**(usual | changes)), transform=None)


def feed(**changes: object) -> Layer:
    return Layer(mixer=None, transform=FeedForward(**({"width": WIDTH, "hidden": 160, "norm": ROOT} | changes)))


def mixture(**changes: object) -> Layer:
    usual = {"width": WIDTH, "hidden": 96, "experts": 8, "top_k": 2, "norm": ROOT}
    return Layer(mixer=None, transform=Mixture(**(usual | changes)))


SHARED = FeedForward(width=WIDTH, hidden=48, norm=None)
ROUTED = {
    "norm": None,
    "router_norm": ROOT,
    "router_scale": 0.125,
    "expert_norm": ROOT,
    "expert_scale": True,
    "activation": Activation.GELU_TANH,
}


def factored(layer: Layer) -> Layer:
    """Products of two thin matrices where it can have them, of ranks that all differ."""
    names = factorable(layer.places)
    return replace(layer, ranks=tuple(MatrixRank(name=name, rank=8 + i) for i, name in enumerate(sorted(names))))


MIXERS: dict[str, Layer] = {
    "grouped": attention(rotary=TURN),
    "all heads, biases, layer norms": attention(
        kv_heads=4, norm=LAYER, post_norm=LAYER, qkv_bias=True, output_bias=True
    ),
    "norm after": attention(rotary=TURN, post_norm=ROOT),
    "no norm": attention(norm=None),
    "norm of each head": attention(rotary=TURN, qk_norm=QueryKeyNorm.HEAD),
    "norm of all heads": attention(qk_norm=QueryKeyNorm.FULL),
    "norm without scale": attention(rotary=Rotary(dims=8), qk_norm=QueryKeyNorm.UNSCALED),
    "keys as values": attention(shared_key_value=True),
    "turned keys, values before": attention(shared_key_value=True, rotary=TURN),
    "normed keys, values before": attention(shared_key_value=True, qk_norm=QueryKeyNorm.HEAD),
    "normed values": attention(rotary=TURN, qk_norm=QueryKeyNorm.HEAD, value_norm=True),
    "normed values alone": attention(value_norm=True),
    "keys as values, values normed": attention(shared_key_value=True, value_norm=True),
    "keys as values, both normed": attention(
        shared_key_value=True, qk_norm=QueryKeyNorm.HEAD, value_norm=True, rotary=Rotary(dims=16, planes=3)
    ),
    "window": attention(kv_heads=4, rotary=TURN, window=100),
    "chunk": attention(kv_heads=4, chunk=256),
    "prefix": attention(kv_heads=4, rotary=TURN, prefix=0.5),
    "sinks": attention(rotary=TURN, sinks=True),
    "sinks, all heads": attention(kv_heads=4, sinks=True),
    "soft cap": attention(softcap=30.0),
    "soft cap, sinks, window": attention(softcap=30.0, sinks=True, window=128),
    "latent": latent(),
    "latent, straight queries": latent(query_rank=None),
    "latent, equal widths": latent(nope_dim=8),
    "latent, prefix": latent(nope_dim=8, prefix=0.25),
}
TRANSFORMS: dict[str, Layer] = {
    "gated": feed(),
    "gated, biases": feed(bias=True, norm=LAYER),
    **{f"gated {kind.value}": feed(activation=kind) for kind in Activation},
    **{
        f"plain {kind.value}": feed(gated=False, activation=kind)
        for kind in Activation
        if not kind.value.startswith("clamped")
    },
    "mixture": mixture(),
    "mixture, plain experts, biases": mixture(gated=False, router_bias=True, expert_bias=True),
    "mixture, shared": mixture(shared=SHARED),
    "mixture, gated shared": mixture(shared=SHARED, shared_gate=True, top_k=3),
    "mixture, norm of the router": mixture(router_norm=ROOT),
    "mixture, norms inside, scales": mixture(**ROUTED),
    "mixture, scores of all": mixture(shared=SHARED, routing=Routing(score=Score.SIGMOID, bias_rate=1e-3, scale=2.5)),
    "mixture, scores as weights": mixture(routing=Routing(weighing=Weighing.SCORE)),
    "mixture, prototypes": mixture(routing=Routing(choice=Choice.PROTOTYPES)),
}
BESIDE = FeedForward(width=WIDTH, hidden=48, norm=ROOT, post_norm=ROOT, activation=Activation.GELU_TANH)
BOTH: dict[str, Layer] = {
    "llama": Layer(mixer=MIXERS["grouped"].mixer, transform=TRANSFORMS["gated"].transform),
    "gpt": Layer(
        mixer=MIXERS["all heads, biases, layer norms"].mixer, transform=feed(gated=False, bias=True).transform
    ),
    "gemma4": Layer(
        mixer=MIXERS["keys as values, both normed"].mixer,
        transform=mixture(**ROUTED, post_norm=ROOT).transform,
        dense=BESIDE,
        sum_norm=ROOT,
        scaled=True,
    ),
    "deepseek": Layer(mixer=MIXERS["latent"].mixer, transform=TRANSFORMS["mixture, shared"].transform),
}
THIN: dict[str, Layer] = {
    f"{name}, thin": factored(layer)
    for name, layer in {**MIXERS, **TRANSFORMS, **BOTH}.items()
    if name in ("grouped", "all heads, biases, layer norms", "keys as values", "latent", "gated", "plain relu", "gpt")
    or name in ("mixture, gated shared", "gemma4", "llama")
}
ENDS: dict[str, Block] = {
    "embedding": Embedding(vocab=512, width=WIDTH),
    "embedding, positions": Embedding(vocab=512, width=WIDTH, positions=2048, scale=8.0),
    "head": Head(vocab=512, width=WIDTH, norm=ROOT),
    "head, tied, capped": Head(vocab=512, width=WIDTH, norm=LAYER, tied=True, bias=True, softcap=30.0),
}
BLOCKS: dict[str, Block] = {**ENDS, **MIXERS, **TRANSFORMS, **BOTH, **THIN}

_PRECISIONS = {torch.float64: Precision.FP64, torch.float32: Precision.FP32, torch.bfloat16: Precision.BF16}


def sizes(setting: Setting) -> Sizes:
    kind = DeviceKind.CUDA if setting.accelerator else DeviceKind.CPU
    one = np.ones(1)
    return operator_sizes(
        batch=one * setting.batch,
        tensor=one,
        split=one,
        itemsize=one * setting.compute.itemsize,
        device=replace(A100, kind=kind),
        job=JobSpec(sequence_length=setting.sequence, data=DataSpec(document_mask=setting.documents)),
        software=software("torch"),
    )


def priced(block: Block, setting: Setting) -> BlockBytes:
    """What the cost model says that `block` leaves when it runs as `setting` says."""
    columns = {
        "microbatch": setting.batch,
        "recompute": RECOMPUTES.index(setting.recompute),
        "precision": PRECISIONS.index(_PRECISIONS[setting.compute]),
    }
    table = PlanTable.build(columns, layouts=[Layout(bounds=(0, 1), ranks=(0,))])
    inverse = np.zeros(1, dtype=np.intp)
    kind, done = Kind(block=block), works(block, setting)
    return block_bytes(kind, table, sizes(setting), inverse, works=done, software=software("torch"))


def works(block: Block, setting: Setting) -> tuple[PartWork, ...]:
    return block_work(block, sizes(setting))
