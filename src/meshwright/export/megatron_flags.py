"""Flags that pretrain_gpt.py of Megatron-LM and of Megatron-DeepSpeed read alike: sizes, optimizer, checkpoints."""

from __future__ import annotations

from meshwright.export.lost import Words, evaluation_words, lost_checkpoints, lost_start, lost_watch, saves_every
from meshwright.export.meaning import Meaning, Sizes
from meshwright.export.refuse import Refusals
from meshwright.export.script import Flag
from meshwright.spec.plan import Design

_FOLDER = "${SAVE_DIR:-checkpoints}"


def size_flags(shape: Sizes, *, deviation: float) -> list[Flag]:
    """The decoder's sizes, and what it is made of by words that both have; first weights are drawn by `deviation`,
    those that write to the residual stream divided by sqrt(2 layers), as here."""
    flags: list[Flag] = [
        ("--num-layers", shape.layers),
        ("--hidden-size", shape.width),
        ("--ffn-hidden-size", shape.feed_forward or shape.mixture[2]),
        ("--num-attention-heads", shape.heads),
        ("--vocab-size", shape.vocab),
        ("--make-vocab-size-divisible-by", 1),
        ("--hidden-dropout", shape.hidden_dropout),
        ("--attention-dropout", shape.attention_dropout),
        ("--init-method-std", deviation),
    ]
    flags += _activation(shape)
    flags += [] if shape.bias else [("--disable-bias-linear",)]
    return flags + ([] if shape.tied else [("--untie-embeddings-and-output-weights",)])


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
        *_saves(design),
        ("--eval-interval", design.job.evaluation.every_steps or asked.steps),
        ("--eval-iters", _evaluation_batches(design)),
    ]


def _saves(design: Design) -> list[Flag]:
    every = saves_every(design)
    return [("--save", _FOLDER), ("--load", _FOLDER), ("--save-interval", every)] if every else []


def _evaluation_batches(design: Design) -> int:
    return max(1, design.job.evaluation.tokens // design.job.batch_tokens)


def lost_to_flags(design: Design, *, verify: str, non_finite: str) -> list[Words]:
    """What neither says of a job, and both do alike but for ranks that are compared and losses that are no numbers."""
    job, batches = design.job, _evaluation_batches(design)
    lines = [
        ("random numbers", f"of seed {job.seed}", f"other ones, of its seed {job.seed + 1}: it takes none below 1"),
        ("weight decay", "matrices", "all but biases and norms: embeddings decay too"),
        (
            "evaluation",
            evaluation_words(design),
            f"of {batches * job.batch_tokens:,} tokens, since it takes whole batches; --split is yours to add",
        ),
    ]
    fix = "--save, --load and --save-interval are yours to add, or plan with --set checkpoint.every_steps"
    written = "while training waits" if job.checkpoint.asynchronous else ""
    lines += lost_checkpoints(design, folder="$SAVE_DIR", kept="all", written=written, fix=fix)
    lines += lost_start(design, fix="--load of a checkpoint in its own form is yours to add")
    lines += [("deterministic", "on", "off; --deterministic-mode turns it on")] if job.deterministic else []
    lines += [("z loss", str(job.z_loss), "none for the vocabulary")] if job.z_loss else []
    waits, trackers = "600 s; --distributed-timeout-minutes is yours to add", "--tensorboard-dir is yours to add"
    lines += lost_watch(design, non_finite=non_finite, waits=waits, verify=verify, trackers=trackers)
    if job.data.document_mask:
        lines.append(("document mask", "on", "off; --reset-attention-mask --reset-position-ids turn it on"))
    return lines
