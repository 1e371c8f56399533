"""One pipeline rank counted: probes traced, their stretches extended to all layers, and put in the step's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from meshwright.run.dry.count import RankCount, heaviest
from meshwright.run.dry.events import Events, Packed, Stretch, is_receive, stretches
from meshwright.run.dry.extend import NotSteady, extended, grown, left
from meshwright.run.dry.jobs import Job, jobs_of
from meshwright.run.dry.names import RECEIVE, place_of
from meshwright.run.dry.order import Orders
from meshwright.run.dry.pace import Pace
from meshwright.run.dry.passes import Passes
from meshwright.run.dry.recipes import Recipes
from meshwright.run.dry.tally import Tally, joined, tally
from meshwright.run.dry.trace import outside_passes, traced
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName


@dataclass(slots=True, kw_only=True)
class Counter:
    """Counts ranks of one design; what ranks of equal content share is traced once, and what is `known` of jobs by
    their keys is not. `whole` leaves nothing out."""

    design: Design
    whole: bool = False
    known: Mapping[str, Packed] = field(default_factory=dict)
    pace: Pace = field(default_factory=lambda: Pace(lambda _line: None))
    recipes: Recipes = field(default_factory=Recipes)
    _traced: dict[str, Packed] = field(default_factory=dict)
    _orders: Orders = field(init=False)

    def __post_init__(self) -> None:
        self._orders = Orders(plan=self.design.plan)

    def count(self, rank: int) -> RankCount:
        """Pipeline rank `rank`."""
        if not self.whole:
            try:
                return self._probed(rank)
            except NotSteady as reason:
                self.pace.say(f"pipeline rank {rank}: probes do not tell it ({reason}), so the whole of it is traced")
        return self._found(rank, tally(self._events(jobs_of(self.design, rank=rank, whole=True).jobs[0])))

    def trace(self, job: Job) -> Packed:
        """What `job` does, where that is not known."""
        if job.key in self.known:
            return self.known[job.key]
        if job.key not in self._traced:
            place = heaviest(job.design.plan, job.rank)
            events = traced(job.design, rank=place, recipes=self.recipes, passed=partial(self._tell, job))
            self._traced[job.key] = Packed.of(events)
        return self._traced[job.key]

    def _tell(self, job: Job, done: int) -> None:
        self.pace.tell(lambda: f"pipeline rank {job.rank}: {done:,} of {job.passes:,} passes of {job.words} traced")

    def _events(self, job: Job) -> Events:
        return self.trace(job).events()

    def _found(self, rank: int, step: Tally, *, probed: bool = False) -> RankCount:
        return RankCount(
            rank=rank,
            memory={part: amount for part, amount in step.top.items() if amount},
            flops=dict(step.flops),
            calls=dict(step.calls),
            bytes=dict(step.bytes),
            host=step.host_top,
            probed=probed,
        )

    def _probed(self, rank: int) -> RankCount:
        """The count from probes. Raises NotSteady where they do not tell it to the byte."""
        plan, jobs = self.design.plan, jobs_of(self.design, rank=rank, whole=False)
        found = [stretches(self._events(job)) for job in jobs.jobs]
        if len({tuple(place_of(plan, entry.name) for entry in each) for each in found}) > 1:
            raise NotSteady("passes differ")
        together = list(zip(*found, strict=True))
        if not jobs.microbatches:
            step = joined(_grown(each, jobs.layers) for each in together)
            return self._found(rank, step, probed=jobs.layers > 0)
        few = jobs.jobs[0].design.plan.schedule.microbatches
        # The second of microbatches in slices sends twice or more, and has waited for all that the first one sent.
        tallies = Passes(early=few - 1, alike=1 if plan.schedule.slices > 1 else 2)
        for each in together:
            place = place_of(plan, each[0].name)
            tallies.add(place, _grown([_without_receives(entry) for entry in each], jobs.layers))
        received = {event for each in found for entry in each for event in entry.events if is_receive(event)}
        if len(received) > 2:
            raise NotSteady("what is received differs")
        step = tallies.in_order(
            self._order(rank),
            receive=tally(received),
            missing=outside_passes(self.design, rank=rank, microbatches=jobs.microbatches),
            left=left(*(_of_step(each) for each in found), more=jobs.layers),
        )
        return self._found(rank, step, probed=True)

    def _order(self, rank: int) -> list[str]:
        """The places of all passes, and RECEIVE between them, in the order of the step."""
        plan = self.design.plan
        if plan.pipeline > 1:
            return [name if name == RECEIVE else place_of(plan, name) for name in self._orders.of(rank)]
        return [f"{LineName.FORWARD}|0|0", f"{LineName.BACKWARD}|0|0"] * plan.schedule.microbatches


def _without_receives(stretch: Stretch) -> Stretch:
    """What is received comes in an order of its own."""
    kept = tuple(event for event in stretch.events if not is_receive(event))
    return Stretch(name=stretch.name, events=kept)


def _of_step(found: Sequence[Stretch]) -> Tally:
    return tally(event for entry in found if entry.name != "held" for event in entry.events)


def _grown(probes: Sequence[Stretch], more: int) -> Tally:
    if len(probes) == 1:
        return tally(probes[0].events)
    short, long = (probe.events for probe in probes)
    return grown(tally(short), tally(long), more) if probes[0].name == "held" else extended(short, long, more)
