"""Validation loss and bits per byte: the same held-out sequences, in the same batches, on every layout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from meshwright.data import Packed
from meshwright.spec.errors import ConfigError, Problem
from meshwright.train.feed import Feed


class Evaluates(Protocol):
    def evaluate(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        documents: torch.Tensor | None = None,
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Mean loss in nats a token, bits for each byte of the text, and over how many sequences."""

    loss: float
    bits_per_byte: float
    num_sequences: int
    seconds: float


def num_sequences(*, tokens: int, sequence_length: int, available: int) -> int:
    """Sequences of held-out text that have `tokens`, none twice."""
    return max(1, min(tokens // sequence_length, available))


def validate(
    laid: Evaluates, *, held_out: Packed, feed: Feed, tokens: int, beat: Callable[[], None] = lambda: None
) -> Validation:
    """The mean over targets of the first `tokens` of `held_out`, batch by batch, of which the last one may have fewer
    sequences; every rank must call it and is given the same. `beat` is told of every batch.

    Raises ConfigError where all of them are masked.
    """
    start = time.perf_counter()
    batch, length = feed.batch, held_out.sequence_length
    count = num_sequences(tokens=tokens, sequence_length=length, available=held_out.num_sequences)
    losses, sizes, targets = [], [], []
    for first in range(0, count, batch):
        beat()
        mine = min(feed.held, max(0, count - first - feed.first))
        losses.append(laid.evaluate(*feed.tensors(held_out.sequences(first + feed.first, mine))))
        whole = held_out.sequences(first, min(batch, count - first))
        targets.append(whole.num_targets)
        sizes.append(whole.num_targets * whole.bytes_per_token)
    if not any(targets):
        raise ConfigError(_nothing_held_out(count))
    found = torch.stack([value.detach().to(torch.float64).reshape(()) for value in losses]).cpu()
    weights = torch.tensor(targets, dtype=torch.float64)
    loss = float((found * weights).sum() / weights.sum())
    bits = loss / math.log(2.0) / (sum(sizes) / sum(targets))
    return Validation(loss=loss, bits_per_byte=bits, num_sequences=count, seconds=time.perf_counter() - start)


def _nothing_held_out(num_sequences: int) -> Problem:
    return Problem(
        what=f"none of the {num_sequences:,} held-out sequences has a target",
        where="data.validation_fraction",
        why="all of their tokens are of prompts",
        fix="hold out more, or evaluate over more tokens",
    )
