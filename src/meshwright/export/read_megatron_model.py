"""The model that flags of Megatron-LM's pretrain_gpt.py build, by the rules of Megatron Core 0.19.

Knows nothing of the writer: names and defaults are from arguments.py, transformer_config.py, moe_utils.py and
multi_latent_attention.py.
"""

from __future__ import annotations

import math
import re

from meshwright.export.meaning import Sizes, deviation_words, routing_words, scaling_words
from meshwright.export.read_activation import read_activation
from meshwright.export.script import Given

# What each of its losses balances (router.py): a microbatch of a rank, each sequence in it, or what all have seen.
_BALANCED = {"aux_loss": "microbatch", "seq_aux_loss": "sequence", "global_aux_loss": "step"}


def read_model(given: Given) -> Sizes:
    """The decoder that the flags build, with the defaults of TransformerConfig and MLATransformerConfig."""
    layers, width, heads = (
        given.degree("--num-layers"),
        given.degree("--hidden-size"),
        given.degree("--num-attention-heads"),
    )
    experts = given.degree("--num-experts") if given.on("--num-experts") else 0
    where = _expert_layers(given, layers) if experts else ()
    gated = given.on("--swiglu")
    hidden = given.degree("--ffn-hidden-size") if given.on("--ffn-hidden-size") else _default_hidden(width, gated)
    latent = given.on("--multi-latent-attention")
    bias = not given.on("--disable-bias-linear")
    kind = given.word("--position-embedding-type", "learned_absolute")
    norm = given.word("--normalization", "LayerNorm")
    return Sizes(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=given.degree("--num-query-groups", 1) if given.on("--group-query-attention") else heads,
        head_dim=0 if latent else given.degree("--kv-channels", width // heads),
        feed_forward=0 if where and all(where) else hidden,
        vocab=_padded(given),
        tied=not given.on("--untie-embeddings-and-output-weights"),
        gated=gated,
        activation=read_activation(given, gated=gated, bias=bias),
        norm={"RMSNorm": "rms", "LayerNorm": "layer"}[norm],
        positions=given.degree("--max-position-embeddings") if kind == "learned_absolute" else 0,
        theta=given.real("--rotary-base", 10000) if kind == "rope" else 0.0,
        qk_norm=given.on("--qk-layernorm"),
        bias=bias,
        qkv_bias=bias or given.on("--add-qkv-bias"),
        latent=_latent(given) if latent else (),
        mixture=_mixture(given, experts, hidden) if experts else (),
        with_experts=where,
        norm_epsilon=given.real("--norm-epsilon", 1e-5),
        scaling=_scaling(given, kind, latent=latent),
        score_scale=_score_scale(given) if latent else 0.0,
        routing=_routing(given) if experts else "none",
        hidden_dropout=given.real("--hidden-dropout", 0.1),
        attention_dropout=given.real("--attention-dropout", 0.1),
        first_weights=deviation_words(given.real("--init-method-std", 0.02)),
    )


def _scaling(given: Given, kind: str, *, latent: bool) -> str:
    """Llama 3's with its own bounds, or for latent attention YaRN by MLATransformerConfig's."""
    if kind == "rope" and latent:
        factor = given.real("--rotary-scaling-factor", 1.0)
        gain = _mscale(factor, given.real("--mscale", 1.0)) / _mscale(factor, given.real("--mscale-all-dim", 0.0))
        return scaling_words("yarn", factor, low=1.0, high=32.0, trained=4096, gain=gain)
    if kind == "rope" and given.on("--use-rope-scaling"):
        return scaling_words("llama3", given.real("--rope-scaling-factor", 8.0), low=1.0, high=4.0, trained=8192)
    return "none"


def _score_scale(given: Given) -> float:
    gain = _mscale(given.real("--rotary-scaling-factor", 1.0), given.real("--mscale-all-dim", 0.0))
    head_dim = given.degree("--qk-head-dim", 128) + given.degree("--qk-pos-emb-head-dim", 64)
    return round(gain * gain / math.sqrt(head_dim), 9)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _routing(given: Given) -> str:
    """A softmax over the chosen ones, or sigmoids divided by their sum; nothing of the losses weighs unless told."""
    score = given.word("--moe-router-score-function", "softmax")
    whole = score == "softmax" and given.on("--moe-router-pre-softmax")
    return routing_words(
        score,
        weighing="score" if whole else "normalized",
        scale=given.real("--moe-router-topk-scaling-factor", 1.0),
        groups=given.degree("--moe-router-num-groups", 1),
        chosen=given.degree("--moe-router-group-topk", 1),
        bias_rate=given.real("--moe-router-bias-update-rate", 1e-3)
        if given.on("--moe-router-enable-expert-bias")
        else 0.0,
        balance=_balance(given),
    )


def _balance(given: Given) -> dict[str, float]:
    """The weight of each loss that balances, by what it balances: a list of kinds has as many weights."""
    kinds = given.words("--moe-router-load-balancing-type", ("aux_loss",))
    weights = given.reals("--moe-aux-loss-coeff", (0.0,) * len(kinds))
    if not set(kinds) <= {*_BALANCED, "none"}:
        raise given.wrong(f"--moe-router-load-balancing-type {' '.join(kinds)} is no balance that a plan knows")
    if len(weights) != len(kinds):
        what = "moe_aux_loss_coeff must be a list of the same length as moe_router_load_balancing_type"
        raise given.wrong(what)
    return {_BALANCED[kind]: weight for kind, weight in zip(kinds, weights, strict=True) if kind != "none"}


def _default_hidden(width: int, gated: bool) -> int:
    return int((4 * width * 2 / 3) / 64) * 64 if gated else 4 * width


def _padded(given: Given) -> int:
    """The vocabulary with the entries that pad it."""
    unit = given.degree("--make-vocab-size-divisible-by", 128) * given.degree("--tensor-model-parallel-size", 1)
    return -(-given.degree("--vocab-size") // unit) * unit


def _latent(given: Given) -> tuple[int, ...]:
    query = given.degree("--q-lora-rank") if given.on("--q-lora-rank") else 0
    names = ("--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim")
    return query, *(given.degree(name, default) for name, default in zip(names, (32, 128, 64, 128), strict=True))


def _mixture(given: Given, experts: int, hidden: int) -> tuple[int, ...]:
    shared = given.number("--moe-shared-expert-intermediate-size", 0)
    return experts, given.degree("--moe-router-topk", 2), given.degree("--moe-ffn-hidden-size", hidden), shared


def _expert_layers(given: Given, layers: int) -> tuple[bool, ...]:
    """A number n is one layer of experts in n, the first of them; a pattern is a sum of lists, some repeated."""
    text = given.word("--moe-layer-freq", "1").replace(" ", "")
    if text.isdigit():
        return tuple(index % int(text) == 0 for index in range(layers))
    found: list[bool] = []
    for bits, times in re.findall(r"\(?\[([01,]+)\]\)?(?:\*(\d+))?", text):
        found += [bit == "1" for bit in bits.split(",")] * given.times(times or "1")
    if len(found) != layers:
        raise given.wrong(f"--moe-layer-freq names {len(found)} layers of {layers}")
    return tuple(found)
