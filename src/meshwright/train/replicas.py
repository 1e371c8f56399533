"""Replicas: a run each of whose replicas trains by itself and meets the others in every step, whoever they are by then.

Who they are is decided outside of this room, at the beginning of every step: a replica that was away has then the state
of the others. They read the whole batch together, however many they are, and a step that any of them could not end is
not done by it: it is tried again, on the same sequences, with whoever is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.data import Batch, Loader, Position
from meshwright.data.fingerprint import BITS
from meshwright.parallel.clip import local_part
from meshwright.parallel.portable import portable
from meshwright.spec.replicas import share_of
from meshwright.spec.report import LineName
from meshwright.spec.units import format_seconds
from meshwright.train.events import Action, Ending, Event, Save, Started, StepDone, StepSpoilt, Stopping
from meshwright.train.known import Known
from meshwright.train.observe.observer import Observer
from meshwright.train.observe.whereabouts import Section
from meshwright.train.run import Run

_SENT_BYTES = 32 * 2**20  # of gradients that meet those of the other replicas at once
_LIMB = 16  # bits of a fingerprint that are summed as one number, which fp64 does exactly
_LIMBS = BITS // _LIMB


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This replica is `index` of `count` that train together since they have met the `formed`th time."""

    index: int
    count: int
    formed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """Where a replica stands: this rank's part of every tensor by name, and all else as JSON values."""

    tensors: Mapping[str, Tensor]
    progress: Mapping[str, Any]


class Replicas(Protocol):
    """The replicas of a run as one rank of one of them, number `own` of `total`, sees them."""

    own: int
    total: int

    def stand(self, rounds: int, *, give: Callable[[], Handed], take: Callable[[Handed], None]) -> None:
        """This one has done so many rounds; `give` is called while `meet` lasts, and `take` before it returns."""

    def meet(self) -> Seat:
        """Who tries the next round. Where others have done more rounds this one stands where they stand."""

    def sum(self, x: Tensor) -> None:
        """x is the sum over all who have met, unless some of them is lost: `commit` says that."""

    def commit(self) -> bool:
        """Whether all that was summed since they met is whole: then one more round is done."""

    def changed(self, change: Changed) -> None:
        """Who trains has changed. Told by one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """From `step` on the replicas `present` train, by their numbers: without those `lost`, with those that `came`. That
    this was so was known `since` then, in seconds of the system clock. `first` where none trained before."""

    step: int
    present: tuple[int, ...]
    lost: tuple[int, ...]
    came: tuple[int, ...]
    since: float
    first: bool

    @property
    def why(self) -> str:
        told = [f"{_named(self.lost)} lost"] if self.lost else []
        told += [f"{_named(self.came)} taken in"] if self.came else []
        return "; ".join(told) or "replicas lost contact, and have met again"

    def words(self) -> str:
        took = max(time.time() - self.since, 0.0)
        count = f"{len(self.present)} replica{'s' * (len(self.present) != 1)}"
        return f"{self.why}: on from step {self.step} after {format_seconds(took)}; {count} by torchft"


def _named(numbers: tuple[int, ...]) -> str:
    verb = "were" if len(numbers) > 1 else "was"
    return f"replica{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} {verb}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What all replicas of a step gave together."""

    loss: float
    num_targets: int
    stop: bool
    fingerprint: int
    present: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class ReplicaRun(Run):
    """One rank's run of one replica. Its plan is that of the replica alone, by which it would read the whole batch.

    The first of those who train tells of it: `observe` makes what it tells with, and it saves for all. `last` is the
    step that was done last here, `missed` the last one of a run that the others end.
    """

    replicas: Replicas
    observe: Callable[[], Observer] | None = None
    tells: bool = False
    present: tuple[int, ...] | None = None
    formed: int | None = None
    since: float | None = None
    read_by: tuple[int, int, int] | None = None
    gathered: float = field(default_factory=time.time)
    last: StepDone | None = None
    ending: Ending | None = None
    missed: StepDone | None = None
    closed: bool = False

    def start(self) -> Started:
        self.replicas.stand(self.rounds_done, give=self._give, take=self._take)
        return Run.start(self)

    @property
    def rounds_done(self) -> int:
        """Rounds that were done, whether a step came of them or a batch was left out."""
        return self.state.consumed // self.design.plan.batch

    def step(self) -> StepDone | StepSpoilt:
        """As of any run; the step is tried until it is done, by as many replicas as there are each time.

        The last one of the run, where the others have done it and stop: this one stands where they stand.
        """
        while True:
            self.marker.mark(step=self.state.step + 1, section=Section.AGREE)
            seat = self.replicas.meet()
            self._tell(seat)
            if self.missed is not None:
                if self._closes():
                    return self.missed
                continue
            done = self._try(seat)
            if done is not None:
                self.gathered = time.time()
                return done
            self.since = self.since or time.time()

    def perform(self, action: Action) -> Event | None:
        if isinstance(action, Save) and not self.tells:
            return None
        return Run.perform(self, action)

    def stop(self, ending: Ending) -> Stopping:
        """None of those who train leaves before all of them have done the last step: each may be the one that saves."""
        self.ending = ending
        while not self.closed:
            self._tell(self.replicas.meet())
            self._closes()
        return Run.stop(self, ending)

    def stand(self, progress: Mapping[str, Any], *, past: int | None = None) -> None:
        Run.stand(self, progress, past=past)
        self.read_by = None

    def _try(self, seat: Seat) -> StepDone | StepSpoilt | None:
        """The next step as one of those who have met; None where it has to be tried again."""
        number, job = self.state.step + 1, self.design.job
        torch.manual_seed(self.state.random_seed)
        rate = self._learning_rate()
        with self._observed(number):
            with self.profiler.section(LineName.INPUT):
                self.marker.mark(step=number, section=Section.INPUT)
                rows = self._rows(seat)
                batch = self.feed.tensors(rows)
            self.marker.mark(step=number, section=Section.MODEL)
            loss = self.laid.step(*batch, number=number)
            with self.profiler.section(LineName.OPTIMIZER):
                self.marker.mark(step=number, section=Section.NORM)
                met = self._met(loss, rows)
                norm = self.laid.clip(job.optimizer.clip_norm)
                known = self.known(torch.tensor(met.loss, dtype=torch.float64), norm, met.num_targets)
                self.marker.mark(step=number, section=Section.OPTIMIZER)
                if not self.replicas.commit():
                    return None
                if known.sound:
                    for group in self.optimizer.param_groups:
                        group["lr"] = rate
                    self.optimizer.step()
        self.marker.mark(step=number, section=Section.AGREE)
        self._note_present(met.present, seat)
        return self._done(met, known, rate=rate) if known.sound else self._left_out(met, known)

    def _closes(self) -> bool:
        """Whether all who have met know that they have met for the last time."""
        self.replicas.sum(torch.ones(1))
        self.closed = self.replicas.commit()
        return self.closed

    def _done(self, met: Met, known: Known, *, rate: float) -> StepDone:
        agreed = self._agree(None)
        plan = self.design.plan
        self.state.advance(sequences=plan.batch, tokens=plan.batch_tokens)
        self.ledger.note(met.fingerprint)
        self.usual.note(loss=known.loss, norm=known.norm)
        self.last = StepDone(
            step=self.state.step,
            tokens=self.state.tokens,
            loss=known.loss,
            grad_norm=known.norm,
            learning_rate=rate,
            seconds=agreed.seconds,
            memory_bytes=agreed.memory_bytes,
            input_seconds=agreed.input_seconds,
            stop_asked=met.stop,
            ranks=agreed.ranks,
        )
        return self.last

    def _left_out(self, met: Met, known: Known) -> StepSpoilt:
        found = self._spoilt(self.state.step + 1, known)
        return StepSpoilt(
            step=found.step,
            loss=found.loss,
            grad_norm=found.grad_norm,
            num_targets=found.num_targets,
            state_finite=found.state_finite,
            unusual=found.unusual,
            stop_asked=met.stop,
        )

    def _rows(self, seat: Seat) -> Batch:
        """This rank's rows of the next batch."""
        batch, consumed = self.design.plan.batch, self.state.consumed
        if self.read_by != (consumed, seat.index, seat.count):
            share, mesh = share_of(self.design.plan, index=seat.index, count=seat.count), self.learners.mesh
            each = len(share) // mesh.data_size
            first = share.start + mesh.data_coordinate * each
            self.loader.close()
            position = Position(consumed=consumed)
            self.loader = Loader(self.corpus.train, position=position, batch=batch, first=first, rows=each)
        self.read_by = consumed + batch, seat.index, seat.count
        return next(self.loader)

    def _met(self, loss: Tensor, rows: Batch) -> Met:
        """Gradients are those of the mean over the whole batch, and what else the replicas know together."""
        own = int(self.laid.num_targets)
        print_ = rows.fingerprint
        limbs = [float(print_ >> (_LIMB * place) & (2**_LIMB - 1)) for place in range(_LIMBS)]
        present = [float(number == self.replicas.own) for number in range(self.replicas.total)]
        told = [float(loss) * own, float(own), float(self.stop_asked()), *limbs, *present]
        summed = torch.tensor(told, dtype=torch.float64)
        self.replicas.sum(summed)
        whole, targets, stop, *rest = summed.tolist()
        count = max(targets, 1.0)
        self._sum_gradients(own / count)
        print_ = sum(int(limb) << (_LIMB * place) for place, limb in enumerate(rest[:_LIMBS])) % 2**BITS
        return Met(
            loss=whole / count,
            num_targets=int(targets),
            stop=stop > 0.0,
            fingerprint=print_,
            present=tuple(number for number, here in enumerate(rest[_LIMBS:]) if here > 0.0),
        )

    def _sum_gradients(self, share: float) -> None:
        gradients = [local_part(p.grad) for _, p in self.laid.named_parameters() if p.grad is not None]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).mul_(share)
            self.replicas.sum(flat)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def _tell(self, seat: Seat) -> None:
        """The first of those who train has an observer, and no other."""
        self.tells = seat.index == 0
        shows = self.tells and self.learners.mesh.rank == 0
        if shows and self.observer is None:
            assert self.observe is not None, "it is built with what it tells with"
            self.observer = self.observe()
            self.observer.see(Run.start(self), extra={})
        elif not shows and self.observer is not None:
            self.observer.leave()
            self.observer = None

    def _note_present(self, present: tuple[int, ...], seat: Seat) -> None:
        before = self.present
        if seat.formed == self.formed and before == present:
            self.since = None
            return
        change = Changed(
            step=self.state.step,
            present=present,
            lost=tuple(number for number in before or () if number not in present),
            came=tuple(number for number in present if before is not None and number not in before),
            since=self.since or self.gathered,
            first=before is None,
        )
        self.present, self.formed, self.since = present, seat.formed, None
        if self.observer is not None:
            self.replicas.changed(change)
            if before is not None:
                self.pending |= {"ranks": float(len(present)), "regroup_seconds": time.time() - change.since}
                self.observer.say(change.words())

    def _give(self) -> Handed:
        tensors = {name: local_part(x) for name, x in portable(self.laid, self.optimizer).tensors.items()}
        beside = {"own_read": self.ledger.own_read, "present": self.present, "last": self._told_last()}
        return Handed(tensors=tensors, progress={**self.progress(), "replica": beside})

    def _take(self, handed: Handed) -> None:
        found = portable(self.laid, self.optimizer)
        with torch.no_grad():
            for name, x in found.tensors.items():
                local_part(x).copy_(handed.tensors[name])
        found.settle()
        self.stand(handed.progress)
        beside = handed.progress["replica"]
        self.ledger.own_read = int(beside["own_read"])
        self.present = None if beside["present"] is None else tuple(beside["present"])
        self.missed = None if beside["last"] is None else StepDone(**beside["last"])

    def _told_last(self) -> dict[str, Any] | None:
        """The last step of a run that stops, as one sees it that missed it."""
        if self.ending is None or self.last is None:
            return None
        return asdict(replace(self.last, stop_asked=self.ending is Ending.SIGNALLED, ranks=None))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """In their order, of one type each, and of so many bytes unless one has more."""
    left = iter(gradients)
    bucket = list(islice(left, 1))
    size = sum(x.nbytes for x in bucket)
    for gradient in left:
        if size + gradient.nbytes > _SENT_BYTES or gradient.dtype is not bucket[0].dtype:
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
