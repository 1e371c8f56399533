"""Context: what every mixer of one forward pass shares: who may see whom, the angles, and remembered keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from meshwright.nn.rotary import Angles, angles
from meshwright.spec.model import Rotary, Temperature

# On average in a sequence: beyond, one masked product is faster than one product a document.
MOST_DOCUMENTS = 16


class Memory(Protocol):
    """Keys and values of positions before those of a forward pass, by mixer."""

    def extend(self, core: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values (b, heads, all, dim) so far of mixer `core`, from those of the new positions."""


class GrowingMemory:
    """Memory of text that is generated step by step: what is new is added for good."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, core: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if core in self.held:
            before = self.held[core]
            k, v = torch.cat((before[0], k), dim=2), torch.cat((before[1], v), dim=2)
        self.held[core] = (k, v)
        return k, v


class Tally(Protocol):
    """How often the experts of one mixture were chosen in the slices of the same sequences, (b, experts)."""

    def add(self, counts: Tensor) -> None:
        """Those of this slice; what is computed again for backward is not counted again."""

    def before(self, *, like: Tensor) -> Tensor:
        """The sum of the slices before this one, zeros as `like` in the first."""

    def total(self) -> Tensor:
        """The sum of all slices so far."""


class Tallies(Protocol):
    """Tallies of one slice, by mixture."""

    def of(self, mixture: int) -> Tally:
        """That of one."""


KnownAngles = dict[tuple[Rotary, int, int, torch.dtype, torch.device], Angles]


@dataclass(slots=True, kw_only=True)
class Context:
    """One forward pass.

    `documents` (b, s) numbers the document of each position, each document in one run; None means one document a
    sequence. `ahead` (b, s) is how many later tokens each new position sees under a prefix mask, which are the rest of
    its document's prompt; None means none. `memory` keeps keys and values by mixer when a sequence comes in runs of
    tokens (text that is generated, slices of a microbatch), and `start` is then the first new position. Masks are made
    once and shared by all layers of the pass; angles outlive it in `known_angles`.

    `length` is that of whole sequences where they come in slices or are divided over ranks, and 0 where this pass has
    them whole; slices keep `tallies` of the experts they choose. Where ranks divide sequences, `positions`, (s,) or
    (b, s) where sequences differ, says which of them x holds, and `documents` and `ahead` are still those of the whole
    sequence, (b, length).
    """

    documents: Tensor | None = None
    ahead: Tensor | None = None
    positions: Tensor | None = None
    length: int = 0
    start: int = 0
    memory: Memory | None = None
    tallies: Tallies | None = None
    known_angles: KnownAngles = field(default_factory=dict)
    known: dict[object, object] = field(default_factory=dict)  # what an exchange of keys works out once a pass
    _lengths: tuple[tuple[int, ...], ...] | None = None
    _prefixes: tuple[tuple[int, ...], ...] | None = None
    _masks: dict[tuple[int | None, int | None, bool, int], Tensor] = field(default_factory=dict)
    _own_angles: KnownAngles = field(default_factory=dict)

    def angles(self, rotary: Rotary, x: Tensor) -> Angles:
        """The angles of the positions of x (b, s, ...)."""
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        start, stop = (0, self.length) if self.positions is not None else (self.start, self.start + x.shape[1])
        key = (rotary, start, stop, dtype, x.device)
        if key not in self.known_angles:
            self.known_angles[key] = angles(rotary, start=start, stop=stop, device=x.device, dtype=dtype)
        whole = self.known_angles[key]
        if self.positions is None:
            return whole
        if key not in self._own_angles:
            self._own_angles[key] = Angles(cos=whole.cos[self.positions], sin=whole.sin[self.positions])
        return self._own_angles[key]

    def shared(self) -> Iterator[Tensor]:
        """Angles and masks so far, which every layer of the pass reads."""
        for found in (*self.known_angles.values(), *self._own_angles.values()):
            yield from (found.cos, found.sin)
        yield from self._masks.values()

    def temperatures(self, temperature: Temperature, x: Tensor) -> Tensor:
        """How much longer each query of x (b, s, heads, d) is made: (s, 1, 1), or (b, s, 1, 1) where positions differ.

        In fp32, and in fp64 with it.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        key = (temperature, self.start, x.shape[1], dtype)
        if key not in self.known:
            stop = self.start + x.shape[1]
            at = torch.arange(self.start, stop, device=x.device) if self.positions is None else self.positions
            steps = torch.floor((at.to(dtype) + 1.0) / temperature.positions)
            self.known[key] = (1.0 + temperature.gain * torch.log1p(steps))[..., None, None]
        found = self.known[key]
        assert isinstance(found, Tensor)
        return found

    def lengths(self, *, window: int | None, chunk: int | None) -> tuple[tuple[int, ...], ...] | None:
        """Lengths of the documents of every sequence, where attention stays inside each and they are few.

        None where a mask says more: a window or chunk cuts a document, or documents are too short to take one by
        one. Known on processors alone, where reading documents waits for nothing, and not while layers compile,
        which every new length would make them do again.
        """
        if self.documents is None or self.memory is not None or torch.compiler.is_compiling():
            return None
        if self.documents.device.type != "cpu":
            return None
        if self._lengths is None:
            self._lengths = _document_lengths(self.documents)
        count, total = sum(len(row) for row in self._lengths), self.documents.shape[1]
        longest = max(max(row) for row in self._lengths)
        cut = (window is not None and window < longest) or (chunk is not None and chunk < total)
        return None if cut or count > MOST_DOCUMENTS * len(self._lengths) else self._lengths

    def prefixes(self) -> tuple[tuple[int, ...], ...]:
        """Of the documents of every sequence that `lengths` counts, how many first tokens see each other; 1 is none."""
        assert self._lengths is not None, "lengths are asked for first"
        if self.ahead is None:
            return tuple((1,) * len(row) for row in self._lengths)
        if self._prefixes is None:
            starts = ([0, *accumulate(row[:-1])] for row in self._lengths)
            self._prefixes = tuple(
                tuple((row[first] + 1).tolist()) for row, first in zip(self.ahead, starts, strict=True)
            )
        return self._prefixes

    def mask(
        self, length: int, *, window: int | None, chunk: int | None, prefix: bool, device: torch.device
    ) -> Tensor | None:
        """Which keys each query sees, bool (1 or b, 1, new, all); None means plain causal."""
        total = self.start + length
        narrow = (window is not None and window < total) or (chunk is not None and chunk < total)
        prefix = prefix and self.ahead is not None
        if self.documents is None and not narrow and not prefix and (self.start == 0 or length == 1):
            return None
        key = (window, chunk, prefix, length)
        if key not in self._masks:
            self._masks[key] = self._build(length, window=window, chunk=chunk, prefix=prefix, device=device)
        return self._masks[key]

    def _build(
        self, length: int, *, window: int | None, chunk: int | None, prefix: bool, device: torch.device
    ) -> Tensor:
        keys = torch.arange(self.start + length, device=device)
        queries = keys[None, self.start :, None]
        last = queries + self.ahead[:, :, None] if prefix and self.ahead is not None else queries
        seen = keys <= last
        if window is not None:
            seen &= (keys - queries).abs() < window
        if chunk is not None:
            seen &= keys // chunk == queries // chunk
        if self.documents is None:
            return seen[:, None]
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return (seen & same[:, self.start :])[:, None]


class SequenceShare(Protocol):
    """Which tokens of every sequence a rank holds, where sequences are divided over ranks."""

    @property
    def length(self) -> int:
        """Tokens of a whole sequence."""

    def positions(self, context: Context) -> Tensor:
        """Where in their sequences the tokens of this rank stand, (s,) or (b, s); int64, ascending in each."""


def _document_lengths(documents: Tensor) -> tuple[tuple[int, ...], ...]:
    edges = torch.ones_like(documents, dtype=torch.bool)
    edges[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found = []
    for row in edges:
        starts = [*row.nonzero().flatten().tolist(), len(row)]
        found.append(tuple(stop - start for start, stop in pairwise(starts)))
    return tuple(found)
