"""Cells in the words of sources: yes and no, recompute, precisions, and what stays unclear."""

from __future__ import annotations

import pytest

from meshwright.replay import words
from meshwright.replay.express import express
from meshwright.replay.published import replay
from meshwright.spec.model import FeedForward
from meshwright.spec.plan import Sharding
from tests.replay.test_validate import row


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        *((name, text, True) for name in words.YES_OR_NO for text in ("yes", "True", "1", "on")),
        *((name, text, False) for name in words.YES_OR_NO for text in ("no", "false", "0", "OFF")),
        *(("flash", text, True) for text in ("FA2", "FA3", "FlashAttention-2", "Flash Attention v2")),
        *(("flash", text, True) for text in ("xformers", "xFormers memory-efficient attention", "mem_efficient")),
        ("flash", "memory", None),
        ("compile", "torch.compile", True),
        *(("gated", text, True) for text in ("SwiGLU", "GeGLU")),
        *(("gated", text, False) for text in ("GELU", "ReLU")),
        ("sp", "SwiGLU", None),
        ("flash", "maybe", None),
        ("gated", "", None),
    ],
)
def test_yes_and_no_are_read_in_the_words_of_sources(name: str, text: str, said: bool | None) -> None:
    found = row(**{name: text})
    assert found.is_yes(name) is said
    assert bool(found.faults) is (said is None and text != "")


def test_the_name_of_an_activation_says_whether_it_is_gated() -> None:
    gated, plain = (express(row(arch="", gated=text)).design.model for text in ("SwiGLU", "GELU"))
    parts = [model.layers[0].transform for model in (gated, plain)]
    assert [part.gated for part in parts if isinstance(part, FeedForward)] == [True, False]


def test_rates_are_counted_over_the_matrices_that_the_words_say() -> None:
    """A gated feed-forward has three."""
    counts = {"iter_s": "", "tflops_gpu": "100", "flop_conv": "3x fwd, full attention", "ffn": "8192"}
    gelu, plain, swiglu = (row(**counts, gated=text).seconds for text in ("GELU", "no", "SwiGLU"))
    assert gelu == plain
    assert plain is not None
    assert swiglu is not None
    assert plain < swiglu


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("activation checkpointing", "full"),
        ("Gradient checkpointing (every layer)", "full"),
        ("activation-checkpointing: selective", "selective"),
        ("selective activation checkpointing", "selective"),
        ("activation checkpointing off", "none"),
    ],
)
def test_checkpointing_is_of_every_layer_unless_more_is_said(text: str, kind: str) -> None:
    assert express(row(recompute=text)).design.plan.first_group.recompute == kind


def test_mics_is_sharding_in_a_node_and_e4m3_is_eight_bits() -> None:
    changes = {"framework": "DeepSpeed", "tp": "1", "pp": "1", "dp": "16", "zero": "MiCS"}
    plan = express(row(**changes)).design.plan
    assert (plan.first_group.sharding, plan.shard) == (Sharding.PARAMETERS, 8)
    eight = express(row(gpu="H100", framework="Megatron-Core", precision="E4M3")).design.plan
    assert eight.first_group.precision == "fp8"


@pytest.mark.parametrize(("text", "both"), [("32K", "32,000 and 32,768"), ("50k", "50,000 and 51,200")])
def test_thousands_of_a_vocabulary_are_refused_with_what_they_may_be(text: str, both: str) -> None:
    reason = replay(row(vocab=text)).reason
    assert f"vocab: {text!r} is not a number: {both} are both called so, write one of them" in reason
