"""Flags that pretrain_gpt.py of Megatron-LM and of Megatron-DeepSpeed read alike: sizes, activation, optimizer."""

from __future__ import annotations

from meshwright.export.meaning import Meaning, Sizes
from meshwright.export.refuse import Refusals
from meshwright.export.script import Flag
from meshwright.spec.plan import Design


def size_flags(shape: Sizes) -> list[Flag]:
    """The decoder's sizes, and what it is made of by words that both have."""
    flags: list[Flag] = [
        ("--num-layers", shape.layers),
        ("--hidden-size", shape.width),
        ("--ffn-hidden-size", shape.feed_forward or shape.mixture[2]),
        ("--num-attention-heads", shape.heads),
        ("--vocab-size", shape.vocab),
        ("--make-vocab-size-divisible-by", 1),
        ("--hidden-dropout", 0.0),
        ("--attention-dropout", 0.0),
    ]
    flags += _activation(shape)
    flags += [] if shape.bias else [("--disable-bias-linear",)]
    return flags + ([] if shape.tied else [("--untie-embeddings-and-output-weights",)])


def norm_epsilon(design: Design) -> float:
    """Of the last norm, which speaks for all; 1e-5 where there is none."""
    return design.model.head.norm.eps if design.model.head.norm else 1e-5


def _activation(shape: Sizes) -> list[Flag]:
    """GELU is the tanh form where it is fused with a bias."""
    if shape.activation == "gelu_tanh":
        return [] if shape.bias else [("--openai-gelu",)]
    names = {"silu": "--swiglu", "relu_squared": "--squared-relu", "gelu": "--no-bias-gelu-fusion"}
    return [(names[shape.activation],)]


def refuse_activation(shape: Sizes, found: Refusals) -> None:
    """Gated by SiLU, or plain GELU or squared ReLU."""
    known = {(True, "silu"), (False, "gelu"), (False, "gelu_tanh"), (False, "relu_squared")}
    words = f"{'gated' if shape.gated else 'plain'} {shape.activation}"
    found.when((shape.gated, shape.activation) not in known, "model", f"feed-forwards of {words}")


def optimizer_flags(said: Meaning, design: Design, *, decay: str) -> list[Flag]:
    """AdamW and its rate, whose decay is called `decay` there, and the seed, of which neither takes one below 1."""
    asked = said.optimizer
    return [
        ("--optimizer", "adam"),
        ("--lr", asked.learning_rate),
        ("--min-lr", f"{asked.learning_rate * asked.final_fraction:.12g}"),
        ("--lr-decay-style", decay),
        ("--lr-warmup-iters", asked.warmup),
        ("--train-iters", asked.steps),
        ("--adam-beta1", asked.beta1),
        ("--adam-beta2", asked.beta2),
        ("--adam-eps", asked.epsilon),
        ("--weight-decay", asked.weight_decay),
        ("--clip-grad", 0.0 if asked.clip_norm is None else asked.clip_norm),
        ("--seed", design.job.seed + 1),
    ]
