from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.model import (
    Attention,
    Embedding,
    FeedForward,
    Head,
    Layer,
    Mixture,
    ModelSpec,
    Norm,
    prefix_tokens,
    score_flops_per_token,
    visible_keys,
)


def llama(*, width: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int) -> ModelSpec:
    norm = Norm(width=width)
    layer = Layer(
        mixer=Attention(width=width, heads=heads, kv_heads=kv_heads, head_dim=width // heads, norm=norm),
        transform=FeedForward(width=width, hidden=hidden, norm=norm),
    )
    return ModelSpec(
        name="llama",
        embedding=Embedding(vocab=vocab, width=width),
        layers=(layer,) * layers,
        head=Head(vocab=vocab, width=width, norm=norm),
        max_positions=8192,
    )


LLAMA_8B = llama(width=4096, hidden=14336, layers=32, heads=32, kv_heads=8, vocab=128256)


def test_llama_3_8b_counts_what_the_model_card_counts() -> None:
    assert LLAMA_8B.parameters == 8_030_261_248


def test_flops_per_token_are_those_that_published_tables_use() -> None:
    """51.5 GFLOP a token for Llama-3-8B at 8,192 with the causal half of attention (Megatron-Bridge's tables)."""
    assert LLAMA_8B.flops_per_token(8192) == pytest.approx(51.5e9, rel=2e-3)


def test_blocks_sum_to_the_model_and_a_tied_head_counts_once() -> None:
    assert sum(block.parameters for block in LLAMA_8B.blocks) == LLAMA_8B.parameters
    tied = replace(LLAMA_8B, head=replace(LLAMA_8B.head, tied=True))
    assert LLAMA_8B.parameters - tied.parameters == 128256 * 4096
    assert tied.flops_per_token(8192) == LLAMA_8B.flops_per_token(8192)


def test_a_mixture_is_active_only_where_it_routes() -> None:
    norm = Norm(width=4096)
    mixture = Mixture(width=4096, hidden=14336, experts=8, top_k=2, norm=norm)
    layers = tuple(replace(layer, transform=mixture) for layer in LLAMA_8B.layers)
    mixtral = replace(
        LLAMA_8B,
        layers=layers,
        embedding=Embedding(vocab=32000, width=4096),
        head=replace(LLAMA_8B.head, vocab=32000),
    )
    assert mixtral.parameters == 46_702_792_704
    assert mixtral.active_parameters == pytest.approx(12.88e9, rel=2e-3)


@given(st.integers(1, 120), st.integers(1, 140), st.integers(1, 140), st.floats(0.0, 1.0))
def test_prefixes_see_later_keys(length: int, window: int, chunk: int, share: float) -> None:
    """Of whole chunks, as the mean counts them; keys nearer than the window either way, to the end of the prefix."""
    length = -(-length // chunk) * chunk if chunk < length else length
    prefix = prefix_tokens(length, share)
    at = np.arange(length)
    last = np.maximum(at, np.minimum(prefix - 1, np.minimum(at + window - 1, at // chunk * chunk + chunk - 1)))
    first = np.maximum(at - window + 1, at // chunk * chunk).clip(min=0)
    found = visible_keys(length, window, chunk, prefix=prefix)
    assert found == pytest.approx((last - first + 1).mean())


def test_half_a_prompt_adds_a_quarter_to_the_scores() -> None:
    layer = Layer(mixer=replace(LLAMA_8B.layers[0].mixer, prefix=0.5), transform=None)
    causal = replace(layer, mixer=LLAMA_8B.layers[0].mixer)
    ratio = score_flops_per_token(layer, 8192) / score_flops_per_token(causal, 8192)
    assert ratio == pytest.approx(1.25, rel=1e-3)


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 400))
def test_visible_keys_are_the_mean_of_what_each_query_sees(length: int, window: int, chunk: int) -> None:
    sees = [min(window, position % chunk + 1) for position in range(min(length, chunk))]
    assert visible_keys(length, window, chunk) == pytest.approx(sum(sees) / len(sees))
