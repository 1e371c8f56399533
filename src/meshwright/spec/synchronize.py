"""How data parallel ranks meet: in every step, or as learners that train apart and meet in rounds of many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from meshwright.spec.cluster import Precision
from meshwright.spec.codec import Among
from meshwright.spec.compression import COMPRESSIONS, Compression

SCALE_BYTES = 4  # of every part that travels in eight bits, or as signs
BLOCK = 128  # elements that have one scale of two bytes in four bits
# Elements that are rounded at once: on a processor as many as stay in its caches with a copy, elsewhere as many as make
# starting kernels cheap and copies small; and into how many pieces a part is cut at the most.
CACHED_ELEMENTS, PIECE_ELEMENTS, PIECES = 2**17, 2**22, 256
TOLD_EVERY = 16  # steps at the most between two times that learners tell each other how they are
TOLD_BYTES = 56  # of the seven whole numbers that they tell


class SyncKind(StrEnum):
    """How ranks along the replicate axis meet.

    every_step: their gradients, in every step. The others make each of them a learner, which takes steps of its own
    and meets the rest in rounds (Rounds). local: parameters are averaged (1602.05629, 1805.09767). diloco: what a round
    changed is averaged, and an outer optimizer of its own steps by it (2311.08105). eager: as diloco, while training
    goes on, each learner keeping all of its own newest progress (2502.12996). co2: one round late, all going on from
    one point, with a penalty for what is stale and a clip (2401.16265). streaming: as diloco, while training goes on,
    each learner mixing what comes back with its own (2501.18512). Of eager and streaming the model may meet in parts at
    different steps.
    """

    EVERY_STEP = "every_step"
    LOCAL = "local"
    DILOCO = "diloco"
    EAGER = "eager"
    CO2 = "co2"
    STREAMING = "streaming"

    @property
    def has_learners(self) -> bool:
        return self is not SyncKind.EVERY_STEP

    @property
    def in_parts(self) -> bool:
        """Parts of the model may meet at different steps, and each travels beside so many steps as it is told."""
        return self in (SyncKind.EAGER, SyncKind.STREAMING)

    @property
    def waits(self) -> bool:
        """Learners stand still until what meets is there."""
        return self in (SyncKind.LOCAL, SyncKind.DILOCO)

    @property
    def least_every(self) -> int:
        """Steps of the shortest rounds that are taken for it where none are asked for: with fewer the loss after as
        many steps is worse, not better (docs/learners.md)."""
        return _LEAST_EVERY.get(self, 1)


_LEAST_EVERY: Mapping[SyncKind, int] = MappingProxyType({SyncKind.DILOCO: 8, SyncKind.CO2: 2, SyncKind.STREAMING: 4})

# Every way of meeting in a word: of those in every step, gradients are whole or compressed.
MEETINGS: tuple[str, ...] = (*(kind.value for kind in SyncKind), *(made().kind for made in COMPRESSIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Bytes in which a part of rounded numbers travels: whole blocks of `elements` in `block_bytes` each, the last one
    filled up, behind `head_bytes`."""

    elements: int
    block_bytes: int
    head_bytes: int

    def filled(self, elements: int) -> int:
        """So many elements in whole blocks."""
        return -(-elements // self.elements) * self.elements

    def part_bytes(self, elements: int) -> int:
        """Of one part of so many elements."""
        return self.filled(elements) // self.elements * self.block_bytes + self.head_bytes


# What numbers are rounded to before they travel: all of a part with one scale, or every block with one of its own.
PACKINGS: Mapping[Precision, Packing] = MappingProxyType(
    {
        Precision.FP8: Packing(elements=1, block_bytes=1, head_bytes=SCALE_BYTES),
        Precision.INT8: Packing(elements=1, block_bytes=1, head_bytes=SCALE_BYTES),
        Precision.INT4: Packing(elements=BLOCK, block_bytes=BLOCK // 2 + 2, head_bytes=0),
    }
)
# What learners send: numbers as they are, or rounded.
ROUND_PRECISIONS: tuple[Precision, ...] = (Precision.FP64, Precision.FP32, Precision.BF16, *PACKINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Rounds of `every` steps after which learners meet.

    The model is cut into `fragments` parts of like size; part p meets p * every / fragments steps later than the first
    one, and what met is applied `delay` steps after that: 0 waits for it, `every` is one round late. The outer
    optimizer is SGD of `learning_rate` and Nesterov `momentum`; what learners send is in `precision`. Where a streamed
    part comes back, `own_share` of the learner's own stays in it. `penalty` weighs what is stale, and an element of an
    outer step is at most `clip` large (both co2's). A round ends `grace_seconds` after `quorum` learners have come to
    it, with those that have; 0 waits for all.
    """

    every: int = 1
    delay: int = 0
    fragments: int = 1
    learning_rate: float = 1.0
    momentum: float = 0.0
    precision: Precision = Precision.FP32
    own_share: float = 0.0
    penalty: float = 1.0
    clip: float = 1.0
    quorum: int = 0
    grace_seconds: float = 0.0

    def starts(self, fragment: int) -> int:
        """Steps into a round at which `fragment` sets out, in 1 ... every."""
        return self.every - (self.fragments - 1 - fragment) * self.every // self.fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSync:
    """How data parallel ranks meet: gradients in every step, reduced in `precision`, whole or as `compression` says;
    but along the replicate axis as `kind` and `rounds` say."""

    kind: SyncKind = SyncKind.EVERY_STEP
    precision: Precision = Precision.FP32
    compression: Compression | None = None
    rounds: Rounds = Rounds()

    @property
    def word(self) -> str:
        """One of MEETINGS."""
        return self.kind.value if self.compression is None else self.compression.kind

    @property
    def keeps_momentum(self) -> bool:
        """The outer optimizer of learners has a momentum."""
        return self.kind is SyncKind.CO2 or (self.kind.has_learners and self.rounds.momentum > 0.0)

    @property
    def keeps_sent(self) -> bool:
        """A learner keeps what it was when what is on its way set out."""
        return self.kind is SyncKind.EAGER

    @property
    def is_special(self) -> bool:
        """Whether ranks meet in rounds or gradients compressed, so that losses are not those of whole gradients."""
        return self.kind.has_learners or self.compression is not None

    @property
    def words(self) -> str:
        """`learners meet as eager every 12 steps`."""
        if self.compression is not None:
            return f"replicas meet in every step by {self.compression.words}"
        if not self.kind.has_learners:
            return "replicas meet in every step"
        often = f"learners meet as {self.kind.value} every {self.rounds.every} step{'s' * (self.rounds.every != 1)}"
        return f"{often}, {self.rounds.quorum} of them at the least" if self.rounds.quorum else often


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronizeSpec:
    """Ways of meeting that a plan may take in place of every step, and `compressions` of gradients that meet in every
    step, one of each kind; numerics change with both, so none is the default.

    `every` is how many steps a round has; 0 takes the fewest that hide the network, `most_every` at most. `precision`
    is what learners send. A round ends `grace_seconds` after `quorum` learners have come; 0 waits for all, but where a
    quorum of unlike learners saves time and leaves out at most the share `most_left_out` of the sequences.
    """

    kinds: tuple[SyncKind, ...] = ()
    every: int = 0
    most_every: int = 128
    precision: Annotated[Precision, Among(ROUND_PRECISIONS)] = Precision.FP32
    quorum: int = 0
    grace_seconds: float = 0.0
    most_left_out: float = 0.0
    compressions: tuple[Compression, ...] = ()


def dealt(sizes: Sequence[int], *, parts: int) -> tuple[tuple[int, ...], ...]:
    """Indexes of `sizes` in so many parts that are as even as the largest first makes them; a part may be empty."""
    found: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        min(found, key=lambda part: sum(sizes[held] for held in part)).append(index)
    return tuple(tuple(sorted(part)) for part in found)


def usual_rounds(kind: SyncKind, *, every: int, learners: int, precision: Precision = Precision.FP32) -> Rounds:
    """The rounds that are recommended for `kind`, by so many learners of so many steps each."""
    if kind is SyncKind.LOCAL:
        return Rounds(every=every, precision=precision)
    if kind is SyncKind.CO2:
        return Rounds(every=every, delay=every, momentum=0.2, precision=precision)
    rate = outer_learning_rate(learners=learners, every=every)
    if kind is SyncKind.DILOCO:
        return Rounds(every=every, learning_rate=rate, momentum=0.9, precision=precision)
    fragments = min(4, every if kind is SyncKind.EAGER else max(1, every // 2))
    in_parts = Rounds(every=every, delay=every // fragments, fragments=fragments, precision=precision)
    if kind is SyncKind.EAGER:
        return in_parts
    return replace(in_parts, learning_rate=rate, momentum=0.9, own_share=0.5)


def outer_learning_rate(*, learners: int, every: int) -> float:
    """DiLoCo's outer learning rate for Nesterov momentum 0.9: 0.7 for 8 learners of rounds of 500 steps (2311.08105).

    The best one rises with both numbers, lies between 0.2 and 1, and does not depend on the model's size (2503.09799);
    how fast it rises is not published as a formula, and is taken as a tenth for every doubling of the learners and a
    twentieth for every ten times as many steps.
    """
    rate = 0.7 + 0.1 * math.log2(learners / 8) + 0.05 * math.log10(every / 500)
    return round(min(max(rate, 0.2), 1.0), 2)


def as_usual(rounds: Rounds, before: Rounds, *, kind: SyncKind, learners: int, were: int) -> Rounds:
    """`rounds` of so many learners with the outer learning rate that is usual for both, where `before` had the one that
    was for as many learners as there `were`; one that was chosen stays."""
    usual, now = (
        usual_rounds(kind, every=each.every, learners=count).learning_rate
        for each, count in ((before, were), (rounds, learners))
    )
    return replace(rounds, learning_rate=now) if kind.has_learners and before.learning_rate == usual else rounds
