"""Validation loss and bits per byte: the same held-out sequences, in the same batches, on every layout."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from meshwright.data import Batch, Packed
from meshwright.train.feed import Feed


class Evaluates(Protocol):
    def evaluate(
        self, tokens: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Mean loss in nats a token, bits for each byte of the text, and over how many sequences."""

    loss: float
    bits_per_byte: float
    num_sequences: int
    seconds: float


def num_batches(*, tokens: int, batch: int, sequence_length: int, available: int) -> int:
    """Whole global batches of held-out text: `tokens` of it and no sequence twice where that much is held out."""
    wanted = max(1, tokens // sequence_length)
    return max(1, min(wanted, available) // batch)


def validate(laid: Evaluates, *, held_out: Packed, feed: Feed, tokens: int) -> Validation:
    """The mean over the first batches of `held_out`; every rank must call it and every rank is given the same."""
    start = time.perf_counter()
    batch, length = feed.batch, held_out.sequence_length
    count = num_batches(tokens=tokens, batch=batch, sequence_length=length, available=held_out.num_sequences)
    losses, lengths = [], []
    for index in range(count):
        first = index * batch
        losses.append(laid.evaluate(*feed.tensors(held_out.sequences(first + feed.first, feed.rows))))
        lengths.append(bytes_per_token(held_out, first=first, count=batch))
    loss = float(torch.stack([value.detach().to(torch.float64).reshape(()) for value in losses]).mean())
    bits = loss / math.log(2.0) / (sum(lengths) / len(lengths))
    return Validation(loss=loss, bits_per_byte=bits, num_sequences=count * batch, seconds=time.perf_counter() - start)


def bytes_per_token(packed: Packed, *, first: int, count: int) -> float:
    """UTF-8 bytes that a target of sequences [first, first + count) stands for, in the mean."""
    whole: Batch = packed.sequences(first, count)
    return whole.bytes_per_token
