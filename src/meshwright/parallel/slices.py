"""Slices: microbatches cut into runs of tokens, each a pass of its own (TeraPipe, 2102.07988; Seq1F1B, 2406.03488).

Slice j attends to the keys and values of slices 0 ... j of its microbatch. Those of earlier slices are leaves that
gather gradients from every later slice, so that slices go backward in reverse: when slice j does, what the later ones
added to its keys and values flows on into it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.nn.context import Context, KnownAngles


class Kept(NamedTuple):
    """Keys or values of one slice as its pass made them, and the leaf that later slices read."""

    made: Tensor
    read: Tensor


class Slices:
    """What the slices of one microbatch leave each other on one stage, by attention core, or mixture, and slice.

    No dataclass: FSDP2 copies those that a layer is given, with all they hold.
    """

    def __init__(self, *, number: int) -> None:
        self.number = number
        self.keys: dict[int, list[Kept]] = {}
        self.values: dict[int, list[Kept]] = {}
        self.counts: dict[int, list[Tensor]] = {}

    def context(self, index: int, *, length: int, documents: Tensor | None, known_angles: KnownAngles) -> Context:
        """Slice `index` of `length` tokens; `documents` (b, s) are those of the whole sequence."""
        stop = (index + 1) * length
        return Context(
            documents=None if documents is None else documents[:, :stop],
            length=self.number * length,
            start=index * length,
            tallies=SliceTallies(slices=self, index=index),
            memory=SliceMemory(slices=self, index=index),
            known_angles=known_angles,
        )

    def gradients(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of slice `index`, and the gradients that later slices left for them. They are forgotten."""
        made: list[Tensor] = []
        above: list[Tensor] = []
        for kept in (*self.keys.values(), *self.values.values()):
            if len(kept) > index:
                last = kept.pop()
                if last.read.grad is not None:
                    made.append(last.made)
                    above.append(last.read.grad)
        return made, above


class SliceMemory:
    """Memory of one slice: what it sees of the slices before it. What is computed again for backward sees the same."""

    def __init__(self, *, slices: Slices, index: int) -> None:
        self.slices, self.index = slices, index
        self.seen: set[int] = set()

    def extend(self, core: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keeps = core not in self.seen and self.index + 1 < self.slices.number
        self.seen.add(core)
        keys, values = (kept.setdefault(core, []) for kept in (self.slices.keys, self.slices.values))
        return self._extend(keys, k, keeps=keeps), self._extend(values, v, keeps=keeps)

    def _extend(self, held: list[Kept], x: Tensor, *, keeps: bool) -> Tensor:
        before = [entry.read for entry in held[: self.index]]
        assert len(before) == self.index, "slices go forward in order"
        if keeps:
            held.append(Kept(made=x, read=x.detach().requires_grad_(x.requires_grad)))
        return torch.cat((*before, x), dim=2) if before else x


class SliceTallies:
    """Tallies of one slice: what the experts of every mixture have taken of the slices before it."""

    def __init__(self, *, slices: Slices, index: int) -> None:
        self.slices, self.index = slices, index

    def of(self, mixture: int) -> SliceTally:
        return SliceTally(self.slices.counts.setdefault(mixture, []), index=self.index)


class SliceTally:
    """As SliceTallies, of one mixture: the counts of every slice are `held`."""

    def __init__(self, held: list[Tensor], *, index: int) -> None:
        self._held, self._index = held, index

    def add(self, counts: Tensor) -> None:
        if len(self._held) == self._index:
            self._held.append(counts)

    def before(self, *, like: Tensor) -> Tensor:
        return sum(self._held[: self._index], torch.zeros_like(like))

    def total(self) -> Tensor:
        return torch.stack(self._held).sum(dim=0)


def cut(x: Tensor, *, microbatch: int, number: int) -> Tensor:
    """(n, s) as (n * number, s / number): the slices of each run of `microbatch` rows, one after the other."""
    if number == 1:
        return x
    parts = x.unflatten(0, (-1, microbatch)).unflatten(2, (number, -1))
    return parts.transpose(1, 2).flatten(0, 2)


def repeat(x: Tensor, *, microbatch: int, number: int) -> Tensor:
    """(n, s) as (n * number, s): every run of `microbatch` rows once for each of its slices."""
    if number == 1:
        return x
    parts = x.unflatten(0, (-1, microbatch))[:, None]
    return parts.expand(-1, number, -1, -1).flatten(0, 2)


class SliceStore:
    """The microbatches of one stage that are on their way; pass i is slice i % number of microbatch i // number.

    `returns`: they come back for backward where gradients are asked for, as they do not to a stage that is still.
    """

    def __init__(self, *, number: int, length: int, returns: bool) -> None:
        self.number, self._length, self._returns = number, length, returns
        self._open: dict[int, Slices] = {}
        self._index = 0

    def begin(self, index: int) -> None:
        """The next forward is that of pass `index`."""
        self._index = index

    def context(self, *, documents: Tensor | None, known_angles: KnownAngles) -> Context:
        """What the pass that has begun sees; `documents` (b, s) are those of whole sequences."""
        microbatch, part = divmod(self._index, self.number)
        slices = self._open.setdefault(microbatch, Slices(number=self.number))
        if part + 1 == self.number and not (self._returns and torch.is_grad_enabled()):
            del self._open[microbatch]
        return slices.context(part, length=self._length, documents=documents, known_angles=known_angles)

    def gradients(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """More ends from which pass `index` goes backward, and their gradients."""
        microbatch, part = divmod(index, self.number)
        found = self._open[microbatch].gradients(part)
        if part == 0:
            del self._open[microbatch]
        return found
