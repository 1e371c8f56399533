from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.loader import Loader
from meshwright.data.pack import Packed, Position, Stream
from meshwright.data.permute import permute

LENGTH = 8


def packed(*sizes: int, weights: tuple[float, ...] | None = None, seed: int = 0, end: int = -1) -> Packed:
    """Streams of counting tokens: stream k holds k * 10000 + place."""
    weights = weights or (1.0,) * len(sizes)
    streams = [
        Stream(np.arange(size, dtype=np.uint32) + 10000 * k, stretches=[(0, size)], weight=weight)
        for k, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return Packed(streams, sequence_length=LENGTH, seed=seed, end=end, byte_lengths=None, mean_bytes=2.5)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=30)
def test_a_permutation_reaches_every_place_once(size: int, seed: int) -> None:
    key = np.full(size, seed, dtype=np.uint64)
    order = permute(np.arange(size, dtype=np.int64), size=size, key=key)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_the_order_is_a_shuffle() -> None:
    key = np.full(2000, 7, dtype=np.uint64)
    order = permute(np.arange(2000, dtype=np.int64), size=2000, key=key)
    assert abs(np.corrcoef(order, np.arange(2000))[0, 1]) < 0.1
    assert not np.array_equal(order, permute(np.arange(2000, dtype=np.int64), size=2000, key=key + np.uint64(1)))


def test_targets_are_one_token_ahead_and_every_token_is_a_target_once() -> None:
    source = packed(100)
    batch = source.sequences(0, source.num_sequences)
    assert source.num_sequences == 12
    assert np.array_equal(batch.targets, batch.tokens + 1)
    assert batch.tokens.dtype == batch.targets.dtype == np.int64
    assert np.array_equal(np.sort(batch.targets.ravel()), np.arange(1, 97))
    assert batch.bytes_per_token == 2.5


def test_every_pass_has_every_window_once_in_another_order() -> None:
    source = packed(1000)
    n = source.num_sequences
    passes = [source.sequences(number * n, n).tokens[:, 0] for number in range(3)]
    for first in passes:
        assert np.array_equal(np.sort(first), np.arange(n) * LENGTH)
    assert not np.array_equal(passes[0], passes[1])
    assert not np.array_equal(passes[1], passes[2])
    assert not np.array_equal(packed(1000, seed=1).sequences(0, n).tokens[:, 0], passes[0])


@given(start=st.integers(0, 5000), count=st.integers(1, 40), seed=st.integers(-3, 2**40))
@settings(max_examples=20)
def test_a_sequence_is_a_function_of_its_number_alone(start: int, count: int, seed: int) -> None:
    many = packed(700, 300, weights=(3.0, 1.0), seed=seed).sequences(start, count)
    again = packed(700, 300, weights=(3.0, 1.0), seed=seed)
    for row in range(count):
        assert np.array_equal(again.sequences(start + row, 1).tokens[0], many.tokens[row])


@given(weights=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5), start=st.integers(0, 3000))
@settings(max_examples=20)
def test_a_mixture_keeps_its_weights_over_any_stretch(weights: list[float], start: int) -> None:
    source = packed(*(500,) * len(weights), weights=tuple(weights))
    stream, _ = source.places(np.arange(start, start + 2048, dtype=np.int64))
    share = np.array(weights) / sum(weights)
    found = np.bincount(stream, minlength=len(weights)) / 2048
    assert np.abs(found - share).max() <= len(weights) / 1024


@pytest.mark.parametrize(
    ("weights", "turns"), [((1.0,) * 1100, 2**17), ((1.0, 1e-5), 2**20), ((0.7, 0.2, 1e-4, 0.1), 2**20)]
)
def test_faint_streams_and_many_of_them_have_their_share(weights: tuple[float, ...], turns: int) -> None:
    """A period of 1,024 turns left out all streams but so many, and gave the faintest a hundred times its weight."""
    stream, window = packed(*(80,) * len(weights), weights=weights).places(np.arange(turns, dtype=np.int64))
    found = np.bincount(stream, minlength=len(weights)) / turns
    share = np.array(weights) / sum(weights)
    assert found.min() > 0.0
    assert np.abs(found / share - 1.0).max() < 0.15
    assert window.max() < 80 // LENGTH


def test_every_stream_of_a_mixture_is_read_without_a_gap() -> None:
    source = packed(900, 500, weights=(5.0, 2.0))
    stream, window = source.places(np.arange(4000, dtype=np.int64))
    for which, size in enumerate((112, 62)):
        mine = window[stream == which]
        for number in range(len(mine) // size):
            assert np.array_equal(np.sort(mine[number * size : (number + 1) * size]), np.arange(size))


def test_a_weight_near_nothing_still_has_its_turn() -> None:
    stream, _ = packed(100, 100, weights=(1.0, 1e-9)).places(np.arange(2**20, dtype=np.int64))
    assert (stream == 1).sum() == 8


def test_documents_count_from_each_end_token() -> None:
    tokens = np.array([0, 5, 6, 0, 7, 8, 9, 0, 4, 4, 4, 4, 4, 4, 4, 4, 4], dtype=np.uint16)
    stream = Stream(tokens, stretches=[(0, len(tokens))], weight=1.0)
    lengths = np.array([0, 0, 0, 0, 3, 1, 2, 1, 5, 1])
    source = Packed([stream], sequence_length=8, seed=0, end=0, byte_lengths=lengths, mean_bytes=9.0)
    batch = source.sequences(0, 2)
    row = int(np.flatnonzero(batch.tokens[:, 1] == 5)[0])
    assert batch.documents[row].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert batch.documents[1 - row].tolist() == [0] * 8
    assert batch.documents.dtype == np.int32
    alone = source.at(np.array([row], dtype=np.int64))
    assert alone.bytes_per_token == (1 + 2 + 0 + 1 + 5 + 1 + 0 + 3) / 8


def test_prompts_are_told_by_how_many_of_their_tokens_come_later() -> None:
    """The end token that opens a document is of its prompt; what lies outside the sequence is not counted."""
    tokens = np.array([0, 5, 6, 7, 8, 0, 9, 0, 4, 4, 4, 4, 4, 4, 3, 3, 3], dtype=np.uint16)
    masked = np.array([0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0], dtype=np.uint8)
    stream = Stream(tokens, stretches=[(0, len(tokens))], weight=1.0, masked=masked)
    source = Packed([stream], sequence_length=8, seed=0, end=0, byte_lengths=None, mean_bytes=1.0)
    batch = source.sequences(0, 2)
    row = int(np.flatnonzero(batch.tokens[:, 1] == 5)[0])
    assert batch.ahead[row].tolist() == [2, 1, 0, 0, 0, 0, 0, 0]
    assert batch.ahead[1 - row].tolist() == [5, 4, 3, 2, 1, 0, 0, 0]
    assert batch.ahead.dtype == np.int32


def test_a_window_joins_stretches() -> None:
    stream = Stream(np.arange(100, dtype=np.uint16), stretches=[(0, 5), (20, 22), (50, 60)], weight=1.0)
    assert len(stream) == 17
    assert stream.read(0, 17).tolist() == [*range(5), 20, 21, *range(50, 60)]
    assert stream.read(4, 4).tolist() == [4, 20, 21, 50]
    assert stream.read(7, 3).tolist() == [50, 51, 52]


@given(replicas=st.sampled_from([1, 2, 3, 4, 6, 12]), steps=st.integers(1, 4), consumed=st.integers(0, 500))
@settings(max_examples=12)
def test_ranks_part_the_global_batch_whatever_their_number(replicas: int, steps: int, consumed: int) -> None:
    source, start = packed(600, 400), Position(consumed=consumed)
    loaders = [
        Loader(source, position=start, batch=12, first=replica * 12 // replicas, rows=12 // replicas)
        for replica in range(replicas)
    ]
    for step in range(steps):
        whole = source.sequences(consumed + 12 * step, 12)
        slices = [next(loader) for loader in loaders]
        assert np.array_equal(np.concatenate([part.tokens for part in slices]), whole.tokens)
        assert np.array_equal(np.concatenate([part.documents for part in slices]), whole.documents)
    assert {loader.position for loader in loaders} == {start.after(12 * steps)}
    for loader in loaders:
        loader.close()


def test_going_on_with_other_ranks_loses_and_repeats_nothing() -> None:
    source = packed(2000)
    seen: list[np.ndarray] = []
    position = Position()
    for replicas, steps in ((4, 3), (2, 5), (1, 2)):
        rows = 8 // replicas
        loaders = [Loader(source, position=position, batch=8, first=r * rows, rows=rows) for r in range(replicas)]
        for _ in range(steps):
            seen += [next(loader).tokens for loader in loaders]
        position = loaders[0].position
        for loader in loaders:
            loader.close()
    assert position == Position(consumed=80)
    assert np.array_equal(np.concatenate(seen), source.sequences(0, 80).tokens)


def test_rows_beyond_the_batch_are_a_fault_of_who_asks() -> None:
    with pytest.raises(AssertionError, match="of the batch"):
        Loader(packed(100), position=Position(), batch=7, first=4, rows=4)
