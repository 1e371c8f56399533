"""What learners that meet in rounds wait for: how long a round travels, beside what, and what of it is exposed.

All figures are of one round until `outer` divides them by its steps. Where one device rounds what it sends it
does so twice: parts to their owners, and, after the first forward pass or step that ends when those have arrived, sums
to everyone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.assemble import Step
from meshwright.cost.layouts import LayoutArrays
from meshwright.cost.links import RoundLinks
from meshwright.cost.machine import Machine
from meshwright.cost.meeting import RoundFigures, round_figures
from meshwright.cost.network import Linear
from meshwright.cost.overlap import Contention, Mutual, Slack, Traffic, exposed
from meshwright.cost.parameters import sent_parameters
from meshwright.cost.round_length import RESERVE, least_steps
from meshwright.cost.states import state_bytes
from meshwright.cost.table import BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import Collective, DeviceKind
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import TOLD_BYTES, TOLD_EVERY

_TRIED = 9  # numbers of steps that are tried until a round of fragments is hidden
_WORK = (LineName.FORWARD, LineName.BACKWARD, LineName.RECOMPUTE, LineName.OPTIMIZER)
_NOTHING = Contention(near=Mutual(added=0.0, idle=0.0), far=Mutual(added=0.0, idle=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Of a step on average, shape (rows,): seconds that are waited for, and those that there would be if nothing hid
    any, an outer step's own in both; bytes that a device sends; steps of a round, 0 of rows without learners."""

    seconds: FloatArray
    whole: FloatArray
    sent_bytes: FloatArray
    every: IntArray


def outer(
    table: PlanTable,
    machines: Sequence[Machine],
    place: BoolArray,
    *,
    step: Step,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
    job: JobSpec,
) -> Outer | None:
    """What learners add to `step`, which is that of one of them; None where no row has some.

    Where the table leaves open how many steps a round has, the fewest that are sound for its kind, that hide it with a
    reserve, and of which what is not hidden takes at most a twentieth: outer steps, and what travels where it is waited
    for. The slowest machine decides.
    """
    learners = table.learners
    apart = learners > 1
    if not table.has_learners or not apart.any():
        return None
    sent = [sent_parameters(table, entry.blocks, arrays=arrays, counts=counts, model=model) for entry in machines]
    window = _Window(step=step)
    roads = [
        _Road(entry.rounds, table, np.where(place[..., index], sent[index], 0.0), window=window, machine=entry)
        for index, entry in enumerate(machines)
        if entry.rounds is not None
    ]
    open_ = apart & (table.every == 0)
    every = table.every
    if open_.any():
        most = max(job.synchronize.most_every, 1)
        found = np.max([road.fewest(most=most) for road in roads], axis=0)
        every = np.where(open_, found, every)
    figures = round_figures(table.syncs, table.sync, every)
    travel = np.max([road.exposed(figures) for road in roads], axis=0)
    whole = np.max([road.whole(figures) for road in roads], axis=0)
    update = np.max([road.update(figures) for road in roads], axis=0)
    steps = figures.every.astype(np.float64)
    largest = np.max(
        [np.where(place[..., index], sent[index], 0.0).max(axis=1) for index in range(len(machines))], axis=0
    )
    told = TOLD_BYTES / np.minimum(steps, TOLD_EVERY)
    bytes_ = _sent_bytes(largest, figures, learners=learners) / steps + 2.0 * (learners - 1.0) / learners * told
    return Outer(
        seconds=np.where(apart, (travel + update) / steps, 0.0),
        whole=np.where(apart, (whole + update) / steps, 0.0),
        sent_bytes=np.where(apart, bytes_, 0.0),
        every=np.where(apart, figures.every, 0),
    )


def with_rounds(step: Step, found: Outer) -> Step:
    """The step of learners with what they wait for on average, on a line of its own."""
    return replace(
        step,
        seconds=step.seconds + found.seconds,
        parts={**step.parts, LineName.OUTER: found.seconds},
        total={**step.total, LineName.OUTER: found.whole},
        figures={**step.figures, "outer_bytes": found.sent_bytes},
    )


def _sent_bytes(elements: FloatArray, figures: RoundFigures, *, learners: IntArray) -> FloatArray:
    """What a device sends in one round, of which it has so many `elements`."""
    fragments = figures.fragments
    rounded = 2.0 * (learners - 1.0) * fragments * figures.part_bytes(elements / fragments, learners)
    return np.where(figures.rounded, rounded, 2.0 * (learners - 1.0) / learners * elements * figures.sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """One step of a learner, in which a round may travel."""

    step: Step

    @property
    def seconds(self) -> FloatArray:
        return self.step.seconds

    def next_pause(self, seconds: FloatArray, microbatches: IntArray) -> FloatArray:
        """Seconds until some microbatch's forward pass or a step ends, `seconds` after one began."""
        parts, step = self.step.parts, self.seconds
        forward = parts[LineName.FORWARD] / np.sum([parts[name] for name in _WORK], axis=0)
        each = step / microbatches
        passed = (np.ceil(np.maximum(seconds / each - forward, 0.0) - 1e-9) + forward) * each
        return np.asarray(np.minimum(passed, np.ceil(seconds / step - 1e-9) * step))

    def slack(self, far: Mapping[LineName, BoolArray], contention: Contention) -> Slack:
        """Seconds of it in which units and links are free; `far` are lines whose collectives go over adapters."""
        parts, total, whole = self.step.parts, self.step.total, self.step.seconds
        work = np.sum([parts[name] for name in _WORK], axis=0)
        near_busy, far_busy = (
            np.sum([np.where(rows == crosses, total[name], 0.0) for name, rows in far.items()], axis=0)
            for crosses in (False, True)
        )
        return Slack(
            work=np.maximum(whole - work, 0.0),
            near=np.maximum(whole - contention.near.idle * work - near_busy, 0.0),
            far=np.maximum(whole - contention.far.idle * work - far_busy, 0.0),
            lanes=np.maximum(whole - total[LineName.HOST], 0.0),
        )


class _Road:
    """The way of a round on machines like those of `machine`: `elements` (rows, ranks) are what ranks send."""

    def __init__(
        self, links: RoundLinks, table: PlanTable, elements: FloatArray, *, window: _Window, machine: Machine
    ) -> None:
        self._links, self._table = links, table
        self._elements = elements.max(axis=1)
        self._window, self._machine = window, machine
        self._contention = machine.contention or _NOTHING
        self._slack = window.slack(links.far, self._contention)
        # A processor's own cores carry what crosses no adapter, and nothing hides it.
        self._waits = np.asarray(~links.way.far & (machine.group.device.kind is DeviceKind.CPU))

    def whole(self, figures: RoundFigures) -> FloatArray:
        """Seconds of all collectives of a round."""
        first, second = self._trip(figures, self._links.whole)
        return figures.fragments * (first + second)

    def exposed(self, figures: RoundFigures) -> FloatArray:
        """Seconds of a round that work waits for, or that it lasts longer; 0 <= it <= the whole."""
        first, second = self._trip(figures, self._links.whole)
        near = sum(self._trip(figures, self._links.near))
        whole, steps = first + second, figures.delay.astype(np.float64)
        beside = Traffic.over(np.minimum(near, whole), self._links.way, num_bytes=self._elements / figures.fragments)
        slack = self._slack.times(steps)
        late = self._late(first, second, figures)
        held = self._links.held * (whole - beside.whole)
        slower = held + self._contention.added(beside) - slack.work
        found = np.max([late, slower, exposed(beside, slack, self._contention)], axis=0)
        hides = (steps > 0.0) & ~self._waits
        return np.asarray(figures.fragments * np.where(hides, np.clip(found, 0.0, whole), whole))

    def update(self, figures: RoundFigures) -> FloatArray:
        """Seconds of the outer steps of one round, which read and write what a rank holds and round what it sends."""
        device, sharing = self._machine.group.device, self._machine.sharing
        coded = figures.coded_by_processor if device.kind is DeviceKind.CPU else figures.coded
        moved = self._elements * (figures.passes * state_bytes(self._table).wide + coded)
        return np.asarray(moved / (device.memory_bandwidth * device.memory_fraction) * sharing.everyone / sharing.speed)

    def fewest(self, *, most: int) -> IntArray:
        """Steps of a round, `most` at most: the fewest that are sound for its kind, hide it and leave little that is
        not hidden."""
        table, step = self._table, self._window.seconds
        many = round_figures(table.syncs, table.sync, np.zeros_like(table.sync))
        alone = replace(many, fragments=np.ones_like(many.fragments))
        waits = (many.delay == 0) | self._waits
        whole, stops = self.whole(alone), self.update(alone)
        stops = np.where(waits, whole + stops, stops)
        hiding = np.where(waits, 0.0, RESERVE * whole) / step
        least = np.maximum(least_steps(stops, step_seconds=step), hiding)
        sound = np.array([meeting.kind.least_every for meeting in table.syncs])[table.sync]
        found: IntArray = np.minimum(np.maximum(np.ceil(least - 1e-9), sound), most).astype(np.int64)
        for _ in range(_TRIED):
            late = ~waits & (found < most) & ~self._is_hidden(round_figures(table.syncs, table.sync, found))
            if not late.any():
                break
            found = found + late
        return found

    def _is_hidden(self, figures: RoundFigures) -> BoolArray:
        """Whether fragments arrive before they are waited for, with a reserve."""
        first, second = self._trip(figures, self._links.whole)
        near = RESERVE * sum(self._trip(figures, self._links.near))
        free = np.where(self._links.way.far, self._slack.far, self._slack.near) * figures.delay
        late = self._late(RESERVE * first, RESERVE * second, figures)
        return np.asarray((late <= 1e-9 * self._window.seconds) & (near <= free), dtype=np.bool_)

    def _late(self, first: FloatArray, second: FloatArray, figures: RoundFigures) -> FloatArray:
        """Seconds after `delay` steps at which a fragment arrives."""
        window = figures.delay * self._window.seconds
        turned = np.where(first <= window, self._window.next_pause(first, self._table.microbatches), first)
        return np.asarray(np.where(figures.rounded, turned, first) + second - window)

    def _trip(self, figures: RoundFigures, links: Mapping[Collective, Linear]) -> tuple[FloatArray, FloatArray]:
        """Seconds of the collectives of one fragment: one, or two of what is rounded."""
        elements, learners = self._elements / figures.fragments, self._table.learners
        packed = learners * figures.part_bytes(elements, learners)
        plain = links[Collective.ALL_REDUCE].seconds(elements * figures.sent)
        traded = links[Collective.ALL_TO_ALL].seconds(packed)
        gathered = links[Collective.ALL_GATHER].seconds(packed)
        return np.where(figures.rounded, traded, plain), np.where(figures.rounded, gathered, 0.0)
