"""Packing: windows of the token stream in an endless seeded order, each a pure function of (seed, index)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.data.fingerprint import fingerprint
from meshwright.data.permute import mix, permute
from meshwright.spec.job import LEAST_SHARE
from meshwright.spec.targets import MASKED

_LEAST_TURNS = 2**10  # of a period
_FAINTEST = 8  # turns of the stream of the least weight: it has its share within an eighth


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Sequences consumed by the whole job: the same number whatever the layout, so any layout goes on from it."""

    consumed: int = 0

    def after(self, sequences: int) -> Position:
        return Position(consumed=self.consumed + sequences)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """`tokens` and `targets` (n, s) int64, targets one token ahead and MASKED where they are of a prompt; `documents`
    (n, s) int32 count documents from 0.

    `num_targets` are those not masked. `bytes_per_token` is the UTF-8 bytes that they stand for, over their number:
    bits per byte is the mean loss in nats / ln 2 / bytes_per_token. `fingerprint` is that of these sequences.
    """

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32]
    bytes_per_token: float
    fingerprint: int

    @property
    def num_targets(self) -> int:
        return int((self.targets != MASKED).sum())

    def filled(self, rows: int) -> Batch:
        """The same sequences in so many rows, of which those behind them have no target."""
        more = ((0, rows - len(self.tokens)), (0, 0))
        return replace(
            self,
            tokens=np.pad(self.tokens, more),
            targets=np.pad(self.targets, more, constant_values=MASKED),
            documents=np.pad(self.documents, more),
        )

    @property
    def ahead(self) -> npt.NDArray[np.int32]:
        """How many later tokens of its prompt are in the sequence with each token, (n, s): what it sees beyond itself
        under a prefix mask. The token that opens a document is of its prompt."""
        places = np.arange(self.targets.shape[1], dtype=np.int32)
        ends = np.where(self.targets == MASKED, places[-1], places)
        return np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1] - places


class Sliced(Protocol):
    """An array of whole numbers, or anything that gives stretches of one."""

    def __getitem__(self, stretch: slice, /) -> npt.NDArray[Any]: ...


class Stream:
    """Stretches [start, stop) of a token array read as one; `weight` is its share of the sequences of a mixture.

    `masked`, as long as `tokens`, is 1 for those that are no targets; None where all are.
    """

    def __init__(
        self,
        tokens: Sliced,
        *,
        stretches: Sequence[tuple[int, int]],
        weight: float,
        masked: Sliced | None = None,
    ) -> None:
        self.weight = weight
        self._tokens, self._masked = tokens, masked
        self._starts = np.array([start for start, _ in stretches], dtype=np.int64)
        self._ends = np.cumsum([stop - start for start, stop in stretches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def windows(self, sequence_length: int) -> int:
        """Whole windows of sequence_length + 1 tokens, each beginning at the last token of the one before."""
        return max(0, (len(self) - 1) // sequence_length)

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + count) of the stream."""
        return self._read(self._tokens, start, count)

    def targets(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """As `read`, MASKED where a token is no target."""
        tokens = self.read(start, count)
        if self._masked is None:
            return tokens
        return np.where(self._read(self._masked, start, count) > 0, MASKED, tokens)

    def _read(self, values: Sliced, start: int, count: int) -> npt.NDArray[np.int64]:
        parts = []
        stretch = int(np.searchsorted(self._ends, start, side="right"))
        while count:
            begin = start - (int(self._ends[stretch - 1]) if stretch else 0)
            take = min(count, int(self._ends[stretch]) - start)
            at = int(self._starts[stretch]) + begin
            parts.append(np.asarray(values[at : at + take], dtype=np.int64))
            start, count, stretch = start + take, count - take, stretch + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Packed:
    """Sequences cut from streams in an endless order.

    Every window of a stream comes once before any comes again, in an order that differs from pass to pass; streams
    take turns by weight. Sequence i depends on the streams, the seed and i alone.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        *,
        sequence_length: int,
        seed: int,
        end: int,
        byte_lengths: npt.NDArray[np.int64] | None,
        mean_bytes: float,
    ) -> None:
        self.sequence_length = sequence_length
        self.streams = tuple(streams)
        self._windows = [stream.windows(sequence_length) for stream in streams]
        self._turns = _turns([stream.weight for stream in streams])
        self._seed, self._end = seed, end
        self._byte_lengths, self._mean_bytes = byte_lengths, mean_bytes

    @property
    def num_sequences(self) -> int:
        """Windows in one pass over every stream."""
        return sum(self._windows)

    @property
    def num_tokens(self) -> int:
        return sum(len(stream) for stream in self.streams)

    def sequences(self, start: int, count: int) -> Batch:
        """Sequences [start, start + count) of the endless order."""
        return self.at(np.arange(start, start + count, dtype=np.int64))

    def at(self, index: npt.NDArray[np.int64]) -> Batch:
        """The sequences with these numbers, one a row."""
        length = self.sequence_length
        tokens, targets = (np.empty((len(index), length), dtype=np.int64) for _ in range(2))
        for row, (stream, window) in enumerate(zip(*self.places(index), strict=True)):
            tokens[row] = self.streams[stream].read(int(window) * length, length)
            targets[row] = self.streams[stream].targets(int(window) * length + 1, length)
        opened = np.cumsum(tokens == self._end, axis=1, dtype=np.int32)
        return Batch(
            tokens=tokens,
            targets=targets,
            documents=opened - opened[:, :1],
            bytes_per_token=self._bytes_per_token(targets),
            fingerprint=fingerprint(index, tokens, targets),
        )

    def places(self, index: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(stream, window of it) of every sequence number."""
        period = len(self._turns.stream)
        turn, block = index % period, index // period
        stream = self._turns.stream[turn]
        number = block * self._turns.count[stream] + self._turns.before[turn]
        window = np.empty_like(number)
        for which, size in enumerate(self._windows):
            mine = stream == which
            if not mine.any():
                continue
            epoch, place = np.divmod(number[mine], size)
            key = mix(mix(np.full(len(epoch), self._seed & (2**64 - 1), dtype=np.uint64)) ^ np.uint64(which))
            window[mine] = permute(place, size=size, key=mix(key ^ epoch.astype(np.uint64)))
        return stream, window

    def _bytes_per_token(self, targets: npt.NDArray[np.int64]) -> float:
        targets = targets[targets != MASKED]
        if self._byte_lengths is None or not targets.size:
            return self._mean_bytes
        return float(self._byte_lengths[targets].sum() / targets.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Turns:
    """One period of turns: whose turn it is, how many turns that stream had before, and turns a period by stream."""

    stream: npt.NDArray[np.int64]
    before: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]


def _turns(weights: Sequence[float]) -> _Turns:
    """Turns by weight, spread as evenly as can be: a period is so long that the faintest stream has _FAINTEST of it;
    none has less than LEAST_SHARE of the weight."""
    share = np.maximum(np.array(weights, dtype=np.float64) / sum(weights), LEAST_SHARE)
    share /= share.sum()
    turns = max(_LEAST_TURNS, 1 << (math.ceil(_FAINTEST / float(share.min())) - 1).bit_length())
    count = np.floor(share * turns).astype(np.int64)
    count[np.argsort(count - share * turns, kind="stable")[: turns - int(count.sum())]] += 1
    stream = np.repeat(np.arange(len(share)), count)
    before = np.arange(turns) - np.repeat(np.cumsum(count) - count, count)
    order = np.argsort((before + 0.5) / count[stream], kind="stable")
    return _Turns(stream=stream[order], before=before[order], count=count)
