"""Tiles cover exactly what a mask shows, each score once, in the fewest products that its pattern allows."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost.token_layouts import ahead_of, dealt, document_starts, first_keys, last_keys, visible_keys
from meshwright.parallel.tiles import MASKED_QUERIES, MOST_TILES, Cover, Tile, seen_runs, tiles
from meshwright.spec.exchange import TokenLayout

LENGTH, RANKS = 96, 4


def shown(found: tuple[Tile, ...], queries: int, keys: int) -> np.ndarray:
    """How often each score is computed."""
    count = np.zeros((queries, keys), dtype=int)
    for tile in found:
        part = count[tile.queries, tile.keys]
        if tile.cover is Cover.WHOLE:
            part += 1
        elif tile.cover is Cover.CAUSAL:
            assert part.shape[0] == part.shape[1]
            part += np.tril(np.ones(part.shape, dtype=int))
        else:
            assert tile.low is not None
            assert tile.high is not None
            places = np.arange(part.shape[1])
            part += (places >= tile.low[:, None]) & (places < tile.high[:, None])
    return count


def seen(queries: np.ndarray, keys: np.ndarray, first: np.ndarray) -> np.ndarray:
    return (keys[None] <= queries[:, None]) & (keys[None] >= first[:, None])


@pytest.mark.parametrize("layout", TokenLayout)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (7, None), (None, 10), (40, 64), (1, None)])
@pytest.mark.parametrize("cuts", [(), (30, 31, 70), (1, 95), tuple(range(0, 96, 3))], ids=len)
def test_tiles_are_the_mask(layout: TokenLayout, window: int | None, chunk: int | None, cuts: tuple[int, ...]) -> None:
    starts = document_starts(np.searchsorted(np.array(cuts), np.arange(LENGTH), side="right")) if cuts else None
    held = dealt(layout, length=LENGTH, ranks=RANKS, starts=starts)
    for queries in held:
        first = first_keys(queries, window=window, chunk=chunk, starts=starts)
        for keys in held:
            found = tiles(*seen_runs(keys, first=first, last=queries))
            assert len(found) <= max(2 * MOST_TILES, -(-len(queries) // MASKED_QUERIES))
            np.testing.assert_array_equal(shown(found, len(queries), len(keys)), seen(queries, keys, first))


def covers(layout: TokenLayout, owner: int) -> list[tuple[Cover, int, int]]:
    """What rank 1 of 4 computes of the keys of `owner`: cover, queries, keys; a rank holds 24 tokens."""
    held = dealt(layout, length=LENGTH, ranks=RANKS)
    found = tiles(*seen_runs(held[owner], first=first_keys(held[1]), last=held[1]))
    return [(t.cover, t.queries.stop - t.queries.start, t.keys.stop - t.keys.start) for t in found]


def test_a_causal_mask_needs_one_product_a_pair_of_ranks() -> None:
    causal, whole = Cover.CAUSAL, Cover.WHOLE
    for layout in TokenLayout:
        assert covers(layout, 1) == [(causal, 24, 24)]
    assert covers(TokenLayout.CONTIGUOUS, 0) == [(whole, 24, 24)]
    assert covers(TokenLayout.CONTIGUOUS, 2) == []
    assert covers(TokenLayout.ZIGZAG, 0) == [(whole, 24, 12)]
    assert covers(TokenLayout.ZIGZAG, 2) == [(whole, 12, 24)]
    assert covers(TokenLayout.STRIPED, 0) == [(causal, 24, 24)]
    assert covers(TokenLayout.STRIPED, 2) == [(causal, 23, 23)]


def test_a_window_skips_what_it_hides() -> None:
    """Scores computed of 4096 contiguous tokens behind a window of 64: near those that are seen, not all."""
    positions = np.arange(4096)
    first = first_keys(positions, window=64)
    found = tiles(*seen_runs(positions, first=first, last=positions))
    computed = sum((tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start) for tile in found)
    assert computed <= 4096 * (MASKED_QUERIES + 64)


def test_a_wide_window_is_whole_but_at_its_ends() -> None:
    """Behind a window of 700 most scores are in products that need no mask."""
    positions = np.arange(2048)
    first = first_keys(positions, window=700)
    found = tiles(*seen_runs(positions, first=first, last=positions))
    np.testing.assert_array_equal(shown(found, 2048, 2048), seen(positions, positions, first))
    area = dict.fromkeys(Cover, 0)
    for tile in found:
        area[tile.cover] += (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
    assert area[Cover.MASKED] <= 2048 * 2 * MASKED_QUERIES
    assert area[Cover.WHOLE] >= 0.5 * visible_keys(2048, window=700).sum()


@pytest.mark.parametrize("layout", TokenLayout)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (7, None), (None, 10)])
def test_prefixes_that_all_of_their_tokens_see(layout: TokenLayout, window: int | None, chunk: int | None) -> None:
    """Two documents, of which the first 37 and the first 20 tokens are prompts (1910.10683)."""
    starts = np.where(np.arange(LENGTH) < 60, 0, 60)
    ahead = np.concatenate([ahead_of(60, prefix=37), ahead_of(LENGTH - 60, prefix=20)])
    held = dealt(layout, length=LENGTH, ranks=RANKS, starts=starts, ahead=ahead)
    for queries in held:
        first = first_keys(queries, window=window, chunk=chunk, starts=starts)
        last = last_keys(queries, window=window, chunk=chunk, ahead=ahead)
        for keys in held:
            at, of = queries[:, None], keys[None]
            prompt = (starts[at] == starts[of]) & (of <= at + ahead[at])
            near = (np.abs(at - of) < (window or LENGTH)) & (at // (chunk or LENGTH) == of // (chunk or LENGTH))
            found = tiles(*seen_runs(keys, first=first, last=last))
            np.testing.assert_array_equal(shown(found, len(queries), len(keys)), prompt & near)
