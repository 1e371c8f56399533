"""Validation: which sequences, in which batches, and what their loss is in bits for each byte."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.data.pack import Packed, Stream
from meshwright.spec.targets import MASKED
from meshwright.train.evaluate import num_sequences, validate
from meshwright.train.feed import Feed

LENGTH = 4


@pytest.mark.parametrize(
    ("tokens", "available", "expected"),
    [(1000, 10_000, 250), (64, 10_000, 16), (1, 10_000, 1), (1000, 37, 37), (1000, 3, 3)],
)
def test_as_many_tokens_as_are_asked_and_no_sequence_twice(tokens: int, available: int, expected: int) -> None:
    assert num_sequences(tokens=tokens, sequence_length=4, available=available) == expected


def held_out(windows: int, *, bytes_of_token: int) -> Packed:
    tokens = np.arange(windows * LENGTH + 1, dtype=np.uint16) % 50
    stream = Stream(tokens, stretches=((0, len(tokens)),), weight=1.0)
    lengths = np.full(64, bytes_of_token, dtype=np.int64)
    return Packed([stream], sequence_length=LENGTH, seed=1, end=60, byte_lengths=lengths, mean_bytes=1.0)


def feed(*, replica: int, replicas: int, batch: int = 8) -> Feed:
    device = torch.device("cpu")
    return Feed(batch=batch, replica=replica, replicas=replicas, device=device, document_mask=True)


@pytest.mark.parametrize(("batch", "replicas", "rows"), [(8, 2, 4), (8, 3, 3), (10, 4, 3), (5, 4, 2), (7, 7, 1)])
def test_ranks_read_each_sequence_once_and_compute_as_many_rows(batch: int, replicas: int, rows: int) -> None:
    feeds = [feed(replica=replica, replicas=replicas, batch=batch) for replica in range(replicas)]
    assert [number for each in feeds for number in range(each.first, each.first + each.held)] == list(range(batch))
    assert {each.rows for each in feeds} == {rows}
    read = [each.tensors(held_out(40, bytes_of_token=1).sequences(each.first, each.held)) for each in feeds]
    assert {len(tokens) for tokens, *_ in read} == {rows}
    assert sum(int((targets == MASKED).all(dim=1).sum()) for _, targets, *_ in read) == rows * replicas - batch


class Means:
    """A model whose loss of a sequence that has targets is its first token; keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def evaluate(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        documents: torch.Tensor | None = None,
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert documents is not None
        assert ahead is None
        there = (targets != MASKED).any(dim=1)
        assert torch.equal(tokens[there, 1:], targets[there, :-1])
        self.seen.append(tokens[there])
        return tokens[there, 0].double().mean() if there.any() else torch.zeros((), dtype=torch.float64)


def test_the_mean_of_every_batch_and_bits_by_the_bytes_of_its_targets() -> None:
    packed, model = held_out(40, bytes_of_token=3), Means()
    found = validate(model, held_out=packed, feed=feed(replica=0, replicas=1), tokens=24 * LENGTH)
    first = packed.sequences(0, 24).tokens[:, 0].mean()
    assert found.loss == pytest.approx(first)
    assert found.bits_per_byte == pytest.approx(first / math.log(2) / 3)
    assert found.num_sequences == 24


@pytest.mark.parametrize(
    ("tokens", "windows", "read"), [(11 * LENGTH, 40, 11), (3 * LENGTH, 40, 3), (24 * LENGTH, 5, 5)]
)
def test_the_last_batch_has_no_more_sequences_than_are_asked_for_and_held_out(
    tokens: int, windows: int, read: int
) -> None:
    packed, model = held_out(windows, bytes_of_token=1), Means()
    found = validate(model, held_out=packed, feed=feed(replica=0, replicas=1), tokens=tokens)
    assert found.num_sequences == read
    assert found.loss == pytest.approx(packed.sequences(0, read).tokens[:, 0].mean())
    shared = [Means() for _ in range(3)]
    for replica, each in enumerate(shared):
        validate(each, held_out=packed, feed=feed(replica=replica, replicas=3), tokens=tokens)
    assert sorted(int(row[0]) for each in shared for batch in each.seen for row in batch) == sorted(
        packed.sequences(0, read).tokens[:, 0].tolist()
    )


def test_data_ranks_share_every_batch_between_them() -> None:
    packed = held_out(40, bytes_of_token=1)
    models = [Means() for _ in range(4)]
    for replica, model in enumerate(models):
        validate(model, held_out=packed, feed=feed(replica=replica, replicas=4), tokens=16 * LENGTH)
    for batch in range(2):
        together = torch.cat([model.seen[batch] for model in models])
        assert np.array_equal(together.numpy(), packed.sequences(8 * batch, 8).tokens)


def test_documents_are_left_out_where_they_are_not_masked() -> None:
    made = feed(replica=1, replicas=2)
    rows = held_out(40, bytes_of_token=1).sequences(made.first, made.rows)
    assert (made.first, made.rows) == (4, 4)
    tokens, targets, documents, _ = made.tensors(rows)
    assert tokens.dtype == targets.dtype == torch.int64
    assert documents is not None
    plain = Feed(batch=8, replica=1, replicas=2, device=torch.device("cpu"), document_mask=False)
    assert plain.tensors(rows)[2:] == (None, None)
    ahead = replace(plain, prefix_mask=True).tensors(rows)[3]
    assert ahead is not None
    assert ahead.tolist() == rows.ahead.tolist()
