"""What hides behind what: a pass of a block is as long as its work and as the queue of every link that it uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind

# A collective, and work on the GPU that runs it, take so much longer beside each other: measured by Galvatron, its
# shipped overlap figure for both (dp_overlap_coe and bct_overlap_coe, 2211.13878).
_CARRIED = 1.126


LINKS = ("work", "near", "far", "lanes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Whether adapters join the ranks of a collective, and seconds of a device's own lanes a byte of its tensor.

    A device reaches its adapter, and where nothing else joins them the others of its node, over the lanes on which it
    copies to the host's memory. Arrays of shape (rows,).
    """

    far: BoolArray
    lanes: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Seconds that collectives take alone, over links in a node (or rack) and over adapters.

    They keep each device's `lanes` to its adapter and its host busy, no longer than they last themselves.
    """

    near: FloatArray
    far: FloatArray
    lanes: FloatArray

    @classmethod
    def over(cls, seconds: FloatArray, way: Way, *, num_bytes: FloatArray) -> Traffic:
        """`seconds` of tensors of `num_bytes` in all that go their `way`; of shape (rows,) or (rows, ranks)."""
        several = np.ndim(seconds) == 2
        rows, each = (way.far[:, None], way.lanes[:, None]) if several else (way.far, way.lanes)
        far = np.where(rows, seconds, 0.0)
        return cls(near=np.where(rows, 0.0, seconds), far=far, lanes=np.minimum(seconds, each * num_bytes))

    @classmethod
    def none(cls, like: FloatArray) -> Traffic:
        nothing = np.zeros_like(like)
        return cls(near=nothing, far=nothing, lanes=nothing)

    @property
    def whole(self) -> FloatArray:
        return self.near + self.far

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(near=self.near + other.near, far=self.far + other.far, lanes=self.lanes + other.lanes)

    def where(self, rows: BoolArray) -> Traffic:
        """What `rows` have, and nothing in others."""
        return Traffic(**{name: np.where(rows, getattr(self, name), 0.0) for name in ("near", "far", "lanes")})

    def times(self, factor: FloatArray) -> Traffic:
        return Traffic(near=self.near * factor, far=self.far * factor, lanes=self.lanes * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutual:
    """What work and a collective beside it do to each other, both at most 1.

    A second of the collective adds `added` seconds to work that outlasts it; of a second of work that the collective
    outlasts, the share `idle` hides nothing.
    """

    added: float
    idle: float

    @classmethod
    def of(cls, taken: float, *, kind: DeviceKind) -> Mutual:
        """`taken` of the device's compute carries bytes, and on accelerators both wait for memory.

        Where processors of the device carry bytes, work is slower by the greater of what they and memory cost.
        """
        carried = 1.0 if kind is DeviceKind.CPU else _CARRIED
        taken = max(taken, 1.0 - 1.0 / carried) if taken else 0.0
        idle = (1.0 - 1.0 / carried) / (1.0 - taken) if carried > 1.0 else 0.0
        return cls(added=taken * carried, idle=idle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Mutual for links in a node (or rack) and for adapters."""

    near: Mutual
    far: Mutual

    def added(self, beside: Traffic) -> FloatArray:
        """Seconds that work lasts longer because of what runs `beside` it."""
        return self.near.added * beside.near + self.far.added * beside.far


def late_beside(beside: Traffic, work: FloatArray, contention: Contention) -> FloatArray:
    """What collectives `beside` so much `work`, and nothing else, add to it; at most their own seconds."""
    idle = np.where(beside.far > 0.0, contention.far.idle, contention.near.idle)
    return _longest(contention.added(beside), beside.whole - (1.0 - idle) * work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of a block; arrays of shape (rows,).

    `work` seconds of the device, which may be idle for `stall` more until its host has started it all, and waits for
    the exchanges in `waits`; `ring` runs beside the scores and delays them by `late`; `tokens` and copies to the
    host's memory run beside all of the work. `copies` take so long, of which the device's lanes are busy for `lanes`
    and its memory for `memory`.
    """

    work: FloatArray
    stall: FloatArray
    waits: Traffic
    ring: Traffic
    late: FloatArray
    tokens: Traffic
    copies: FloatArray
    lanes: FloatArray
    memory: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """Seconds of a pass in which units, links in the node, adapters and lanes to them are free for collectives."""

    work: FloatArray
    near: FloatArray
    far: FloatArray
    lanes: FloatArray

    @classmethod
    def beside(cls, work: FloatArray, stall: FloatArray, contention: Contention) -> Slack:
        """Of work that nothing else runs beside and that waits for nothing."""
        near, far = (stall + (1.0 - mutual.idle) * work for mutual in (contention.near, contention.far))
        return cls(work=stall, near=near, far=far, lanes=stall + work)

    @classmethod
    def either(cls, rows: BoolArray, yes: Slack, no: Slack) -> Slack:
        """`yes` in `rows`, else `no`."""
        return cls(**{name: np.where(rows, getattr(yes, name), getattr(no, name)) for name in LINKS})

    def times(self, factor: FloatArray) -> Slack:
        return Slack(**{name: getattr(self, name) * factor for name in LINKS})

    def __add__(self, other: Slack) -> Slack:
        return Slack(**{name: getattr(self, name) + getattr(other, name) for name in LINKS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What a pass waits for beside its work and `waits`, by cause, and what it leaves free; arrays of shape (rows,)."""

    ring: FloatArray
    tokens: FloatArray
    copies: FloatArray
    slack: Slack


def passed(entry: Pass, contention: Contention) -> Passed:
    """How long a pass lasts: what shares a link adds up, and the longest queue, or the work, counts.

    Work that outlasts what runs beside it is later by what that takes from it. Every bound is a sum of seconds, none
    of them subtracted: nothing that becomes faster makes a pass longer.
    """
    worked = entry.work + entry.waits.whole
    alone = worked + entry.stall
    worked = worked + entry.late
    queued = _queues(entry, entry.ring, contention)
    first = _longest(alone, worked, queued.near, queued.far)
    worked = worked + contention.added(entry.tokens)
    queued = _queues(entry, entry.ring + entry.tokens, contention)
    second = _longest(first, worked, queued.near, queued.far)
    copied = entry.copies > 0.0
    worked = worked + entry.memory
    lanes = entry.lanes + entry.waits.lanes + entry.ring.lanes + entry.tokens.lanes
    third = np.where(copied, _longest(second, worked, entry.copies, lanes), second)
    return Passed(
        ring=first - alone,
        tokens=second - first,
        copies=third - second,
        slack=Slack(work=third - worked, near=third - queued.near, far=third - queued.far, lanes=third - lanes),
    )


def _longest(*bounds: FloatArray) -> FloatArray:
    return np.asarray(np.max(bounds, axis=0), dtype=np.float64)


def _queues(entry: Pass, beside: Traffic, contention: Contention) -> Traffic:
    """Seconds that links in the node and adapters are busy, with those in which work keeps them from going on."""
    return Traffic(
        near=entry.waits.near + beside.near + contention.near.idle * entry.work,
        far=entry.waits.far + beside.far + contention.far.idle * entry.work,
        lanes=entry.waits.lanes + beside.lanes,
    )


def exposed(beside: Traffic, slack: Slack, contention: Contention | None) -> FloatArray:
    """What collectives `beside` a pass add to it, 0 <= it <= their whole; all of it where nothing runs beside work."""
    if contention is None:
        return beside.whole
    return _longest(
        np.zeros_like(slack.work),
        contention.added(beside) - slack.work,
        beside.near - slack.near,
        beside.far - slack.far,
        beside.lanes - slack.lanes,
    )
