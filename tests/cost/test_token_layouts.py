"""Layouts of tokens over context ranks: every token once, as many each, and the imbalance that each leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import predict
from meshwright.cost.heaviest import heaviest_rank
from meshwright.cost.table import TOKEN_LAYOUTS
from meshwright.cost.token_layouts import (
    ahead_of,
    dealt,
    document_starts,
    layout_imbalance,
    visible_keys,
)
from meshwright.cost.work import Sizes
from meshwright.spec.exchange import Exchange, TokenLayout
from tests.search.search_samples import design, job
from tests.support import models

LENGTH, LONG = 4096, 262144


def packed(*, length: int, count: int, seed: int) -> np.ndarray:
    """Where documents of a packed sequence start, by position: `count` cuts, and a long tail of short ones."""
    rng = np.random.default_rng(seed)
    cuts = np.sort((rng.random(count) ** 3 * length).astype(int))
    return document_starts(np.searchsorted(cuts, np.arange(length), side="right"))


def imbalance(positions: np.ndarray, visible: np.ndarray) -> float:
    """The work of the rank that has most over the mean, from the positions of each and the keys that queries see."""
    work = visible[positions].sum(axis=1)
    return float(work.max() / work.mean())


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("layout", TokenLayout)
def test_every_rank_holds_as_many_tokens_and_every_token_is_held_once(layout: TokenLayout, ranks: int) -> None:
    starts = packed(length=1024, count=9, seed=ranks)
    for traders in (1, 2, ranks):
        held = dealt(layout, length=1024, ranks=ranks, starts=starts, traders=traders)
        assert held.shape == (ranks, 1024 // ranks)
        assert sorted(held.ravel()) == list(range(1024))
        assert (np.diff(held, axis=1) > 0).all() or traders > 1
        assert (np.diff(np.sort(held.reshape(ranks // traders, -1), axis=1), axis=1) > 0).all()


def test_what_queries_see_is_counted_by_hand() -> None:
    starts = document_starts(np.array([7, 7, 7, 3, 3, 9]))
    assert starts.tolist() == [0, 0, 0, 3, 3, 5]
    assert visible_keys(6).tolist() == [1, 2, 3, 4, 5, 6]
    assert visible_keys(6, starts=starts).tolist() == [1, 2, 3, 1, 2, 1]
    assert visible_keys(6, window=2).tolist() == [1, 2, 2, 2, 2, 2]
    assert visible_keys(6, chunk=4).tolist() == [1, 2, 3, 4, 1, 2]
    assert visible_keys(6, chunk=4, window=3, starts=starts).tolist() == [1, 2, 3, 1, 1, 1]
    ahead = ahead_of(6, prefix=4)
    assert ahead.tolist() == [3, 2, 1, 0, 0, 0]
    assert visible_keys(6, ahead=ahead).tolist() == [4, 4, 4, 4, 5, 6]
    assert visible_keys(6, window=2, ahead=ahead).tolist() == [2, 3, 3, 2, 2, 2]
    assert visible_keys(6, chunk=3, ahead=ahead).tolist() == [3, 3, 3, 1, 2, 3]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_imbalance_of_a_causal_mask_is_the_papers(ranks: int) -> None:
    """Contiguous 2 - 1/n, zigzag none, striped as far apart as neighbouring tokens (2311.09431)."""
    found = {layout: layout_imbalance(layout, length=LENGTH, ranks=ranks) for layout in TokenLayout}
    each = LENGTH // ranks
    exact = (LENGTH - (each - 1) / 2) / ((LENGTH + 1) / 2)
    assert found[TokenLayout.CONTIGUOUS] == pytest.approx(exact, rel=1e-12)
    assert found[TokenLayout.CONTIGUOUS] == pytest.approx(2 - 1 / ranks, rel=1e-3)
    assert found[TokenLayout.ZIGZAG] == 1.0
    assert found[TokenLayout.STRIPED] == pytest.approx(1 + (ranks - 1) / (LENGTH + 1), rel=1e-12)
    assert found[TokenLayout.BALANCED] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_prompts_that_see_all_of_themselves_are_uneven_in_a_zigzag(ranks: int) -> None:
    """Where the first half of a sequence is a prompt: contiguous 8/5 - 4/5n, zigzag 6/5 - 1/5n, others even."""
    half = LENGTH // 2
    found = {layout: layout_imbalance(layout, length=LENGTH, ranks=ranks, prefix=half) for layout in TokenLayout}
    assert found[TokenLayout.CONTIGUOUS] == pytest.approx(1.6 - 0.8 / ranks, rel=1e-3)
    assert found[TokenLayout.ZIGZAG] == pytest.approx(1.2 - 0.2 / ranks, rel=1e-3)
    assert found[TokenLayout.STRIPED] == pytest.approx(1.0, abs=4e-3)
    assert found[TokenLayout.BALANCED] == pytest.approx(1.0, abs=4e-3)


def test_the_balanced_layout_counts_what_prompts_see() -> None:
    """Two documents of unlike prompts: dealt as if they were causal, ranks are further from even."""
    starts = np.where(np.arange(LENGTH) < LENGTH // 4, 0, LENGTH // 4)
    ahead = np.concatenate([ahead_of(LENGTH // 4, prefix=10), ahead_of(3 * LENGTH // 4, prefix=LENGTH // 2)])
    work = visible_keys(LENGTH, starts=starts, ahead=ahead)
    knows, causal = (
        imbalance(dealt(TokenLayout.BALANCED, length=LENGTH, ranks=4, starts=starts, ahead=given), work)
        for given in (ahead, None)
    )
    assert knows < 1.005
    assert causal > 1.05


@pytest.mark.parametrize("seed", range(5))
def test_with_documents_the_balanced_layout_is_even_and_the_zigzag_one_is_not(seed: int) -> None:
    starts = packed(length=8192, count=12, seed=seed)
    found = {layout: layout_imbalance(layout, length=8192, ranks=8, starts=starts) for layout in TokenLayout}
    assert found[TokenLayout.BALANCED] < 1.02
    assert found[TokenLayout.STRIPED] < 1.02
    assert found[TokenLayout.ZIGZAG] > 1.2


def test_ranks_that_trade_heads_share_their_work() -> None:
    """Of eight contiguous ranks, runs of four that trade heads are as uneven as two."""
    several = layout_imbalance(TokenLayout.CONTIGUOUS, length=LENGTH, ranks=8, traders=4)
    assert several == layout_imbalance(TokenLayout.CONTIGUOUS, length=LENGTH, ranks=2)
    assert layout_imbalance(TokenLayout.CONTIGUOUS, length=LENGTH, ranks=8, traders=8) == 1.0
    starts = packed(length=LENGTH, count=5, seed=0)
    held = dealt(TokenLayout.BALANCED, length=LENGTH, ranks=8, traders=2, starts=starts)
    found = imbalance(held.reshape(4, -1), visible_keys(LENGTH, starts=starts))
    assert found == layout_imbalance(TokenLayout.BALANCED, length=LENGTH, ranks=8, traders=2, starts=starts)
    assert found < 1.02


def test_scores_are_priced_by_the_rank_that_has_most() -> None:
    one = np.ones(len(TOKEN_LAYOUTS))
    sizes = Sizes(
        batch=one,
        sequence=float(LENGTH),
        tensor=one,
        split=one,
        itemsize=2 * one,
        context=4 * one,
        token_layout=np.arange(len(TOKEN_LAYOUTS)),
    )
    found = heaviest_rank(models.attention(), sizes)
    assert np.array(found).tolist() == [layout_imbalance(layout, length=LENGTH, ranks=4) for layout in TOKEN_LAYOUTS]
    assert heaviest_rank(models.attention(), replace(sizes, context=1.0)) == 1.0
    prompts = heaviest_rank(models.attention(prefix=0.5), sizes)
    half = [layout_imbalance(layout, length=LENGTH, ranks=4, prefix=LENGTH // 2) for layout in TOKEN_LAYOUTS]
    assert np.array(prompts).tolist() == half
    far = heaviest_rank(models.attention(window=64), sizes)
    assert np.array(far)[0] == layout_imbalance(TokenLayout.CONTIGUOUS, length=LENGTH, ranks=4, window=64) < 1.05


def test_contiguous_tokens_make_the_predicted_step_longer() -> None:
    """On long sequences by most of what the heaviest rank has more of the scores; memory is the same."""
    zigzag = design(context=4, shard=1, tensor=1, pipeline=1, asked=job(length=LONG, sequences=16))
    zigzag = replace(zigzag, plan=replace(zigzag.plan, sequence_length=LONG))
    plan = replace(zigzag.plan, exchange=Exchange(layout=TokenLayout.CONTIGUOUS))
    usual, uneven = predict(zigzag), predict(replace(zigzag, plan=plan))
    share = layout_imbalance(TokenLayout.CONTIGUOUS, length=LONG, ranks=4)
    assert 0.8 * share < uneven.step_seconds / usual.step_seconds < share
    assert uneven.memory == usual.memory
