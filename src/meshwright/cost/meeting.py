"""How replicas of rows of a plan table meet: ways of meeting, and the figures of their rounds row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.cost.coding import CODINGS, Coding
from meshwright.spec.cluster import Precision
from meshwright.spec.compression import COMPRESSIONS, Compression
from meshwright.spec.job import JobSpec
from meshwright.spec.synchronize import PACKINGS, GradientSync, Packing, Rounds, SyncKind, usual_rounds

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
_UNKNOWN = 8  # steps of rounds that are still to be found: enough for as many fragments as there ever are
_STRIDE = 1 << 32
_PLAIN, _NOTHING = Packing(elements=1, block_bytes=1, head_bytes=0), Coding(bytes=0.0, processor_bytes=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One way of meeting. `rounds` None are the usual ones of as many steps as a row has, sent in `precision`, that end
    `grace_seconds` after `quorum` learners have come; gradients that meet in every step may be compressed."""

    kind: SyncKind = SyncKind.EVERY_STEP
    compression: Compression | None = None
    precision: Precision = Precision.FP32
    quorum: int = 0
    grace_seconds: float = 0.0
    rounds: Rounds | None = None

    def of(self, *, every: int, learners: int) -> Rounds:
        """Rounds of `every` steps, 1 at the least."""
        if self.rounds is not None:
            return self.rounds
        if not self.kind.has_learners:
            return Rounds()
        usual = usual_rounds(self.kind, every=max(every, 1), learners=learners, precision=self.precision)
        return replace(usual, quorum=self.quorum, grace_seconds=self.grace_seconds)

    def gradients(self, *, every: int, learners: int, precision: Precision) -> GradientSync:
        """Of a plan whose gradients meet in `precision` inside a learner."""
        rounds = self.of(every=every, learners=learners)
        return GradientSync(kind=self.kind, precision=precision, compression=self.compression, rounds=rounds)


USUAL_MEETINGS = (
    *(Meeting(kind=kind) for kind in SyncKind),
    *(Meeting(compression=made()) for made in COMPRESSIONS),
)  # in the order of MEETINGS


def meetings_of(job: JobSpec) -> tuple[Meeting, ...]:
    """USUAL_MEETINGS as the job says them, and with its defaults what it does not."""
    asked = job.synchronize
    said = {each.kind: each for each in asked.compressions}
    return tuple(
        replace(meeting, precision=asked.precision, quorum=asked.quorum, grace_seconds=asked.grace_seconds)
        if meeting.compression is None
        else replace(meeting, compression=said.get(meeting.compression.kind, meeting.compression))
        for meeting in USUAL_MEETINGS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """Of rounds, shape (rows,): steps `every` and `delay`, `fragments`, bytes of an element as it is `sent`, `rounded`
    in eight bits or four or not; copies of parameters that are `kept` for good; those of a fragment beside what travels
    when it lands or sets out, for a `moment`, and with what travelled for the `stepping` after it; passes over them
    that an outer step makes, and bytes of memory in whose time an element is `coded`, by a processor or by others.

    What is rounded travels in blocks of `block` elements in `block_bytes` each, behind `head_bytes` a part.
    """

    every: Ints
    delay: Ints
    fragments: Ints
    sent: Floats
    kept: Floats
    moment: Floats
    stepping: Floats
    passes: Floats
    rounded: Mask
    block: Floats
    block_bytes: Floats
    head_bytes: Floats
    coded: Floats
    coded_by_processor: Floats

    def part_bytes(self, elements: Floats, learners: Ints) -> Floats:
        """Of one of as many parts as there are learners, the last of which is filled up, as it travels rounded."""
        blocks = np.ceil(np.ceil(elements / learners) / self.block)
        return np.asarray(blocks * self.block_bytes + self.head_bytes)


# Reads and writes of an element by an outer step: what is its own and its anchor are read, what sets out, comes back
# and is gone on from written; momentum is read and written, and so is what an eager learner keeps of its own.
_PASSES, _MOMENTUM, _OWN = 5.0, 2.0, 2.0


def round_figures(syncs: Sequence[Meeting], sync: Ints, every: Ints) -> RoundFigures:
    """The figures of rows with these ways of meeting; where `every` is 0, of rounds of many steps."""
    codes, inverse = np.unique(sync * _STRIDE + np.where(every > 0, every, _UNKNOWN), return_inverse=True)
    found = [_figures(syncs[code // _STRIDE], every=code % _STRIDE) for code in codes.tolist()]
    columns = np.array(found, dtype=np.float64)[inverse.reshape(-1)].T
    whole = columns[:3].astype(np.int64)
    return RoundFigures(
        every=whole[0],
        delay=whole[1],
        fragments=whole[2],
        sent=columns[3],
        kept=columns[4],
        moment=columns[5],
        stepping=columns[6],
        passes=columns[7],
        rounded=columns[8] > 0.0,
        block=columns[9],
        block_bytes=columns[10],
        head_bytes=columns[11],
        coded=columns[12],
        coded_by_processor=columns[13],
    )


def _figures(meeting: Meeting, *, every: int) -> tuple[float, ...]:
    rounds, kind = meeting.of(every=every, learners=2), meeting.kind
    packing, coding = PACKINGS.get(rounds.precision, _PLAIN), CODINGS.get(rounds.precision, _NOTHING)
    momentum = rounds.momentum > 0.0 or kind is SyncKind.CO2
    own = kind is SyncKind.EAGER
    kept = 1.0 + momentum + own if kind.has_learners else 0.0
    narrow = rounds.precision not in (Precision.FP32, Precision.FP64)
    # A learner's own, and what came back where that is not what travelled itself; co2 makes its last step beside both.
    # Of those that come without the others each takes a part at a time from its neighbour: half, where they are two; of
    # rounded numbers it packs beside what it gives, and what came is unpacked in the place of both.
    ring = rounds.quorum > 0 and rounds.precision not in PACKINGS
    moment, stepping = 1.0 + narrow + 0.5 * ring, 3.0 * (kind is SyncKind.CO2)
    passes = _PASSES + _MOMENTUM * momentum + _OWN * own
    return (
        rounds.every,
        rounds.delay,
        rounds.fragments,
        float(rounds.precision.bytes),
        kept,
        moment,
        stepping,
        passes,
        rounds.precision in PACKINGS,
        packing.elements,
        packing.block_bytes,
        packing.head_bytes,
        coding.bytes,
        coding.processor_bytes,
    )
