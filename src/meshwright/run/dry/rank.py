"""One pipeline rank counted: probes traced, their stretches extended to all layers, and put in the step's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from meshwright.run.dry.count import RankCount, content, heaviest
from meshwright.run.dry.events import Event, Stretch, is_receive, stretches
from meshwright.run.dry.extend import NotSteady, extended, grown
from meshwright.run.dry.order import RECEIVE, Orders
from meshwright.run.dry.passes import Passes
from meshwright.run.dry.recipes import Recipes
from meshwright.run.dry.shrink import fewer_microbatches, is_split, shrunk, split
from meshwright.run.dry.tally import Tally, joined, tally
from meshwright.run.dry.trace import outside_passes, traced
from meshwright.spec.plan import Design, Plan
from meshwright.spec.report import LineName


@dataclass(slots=True, kw_only=True)
class Counter:
    """Counts ranks of one design; what ranks of equal content share is traced once. `whole` leaves nothing out."""

    design: Design
    whole: bool = False
    say: Callable[[str], None] = lambda _line: None
    _known: dict[str, tuple[Event, ...]] = field(default_factory=dict)
    _recipes: Recipes = field(default_factory=Recipes)
    _orders: Orders = field(init=False)

    def __post_init__(self) -> None:
        self._orders = Orders(plan=self.design.plan)

    def count(self, rank: int) -> RankCount:
        """Pipeline rank `rank`."""
        if not self.whole:
            try:
                return self._probed(rank)
            except NotSteady as reason:
                self.say(f"pipeline rank {rank}: probes do not tell it ({reason}), so the whole of it is traced")
        return self._found(rank, tally(self._traced(shrunk(self.design, rank=rank, whole=True).designs[0], rank)))

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
        plan, probe = self.design.plan, shrunk(self.design, rank=rank, whole=False)
        few = tuple(fewer_microbatches(design) for design in probe.designs)
        found = [stretches(self._traced(design, rank)) for design in few]
        if len({tuple(_place(plan, entry.name) for entry in each) for each in found}) > 1:
            raise NotSteady("passes differ")
        together = list(zip(*found, strict=True))
        if few[0].plan.schedule.microbatches == plan.schedule.microbatches:
            step = joined(_grown(each, probe.more) for each in together)
            return self._found(rank, step, probed=probe.more > 0)
        tallies = Passes()
        for each in together:
            place = _place(plan, each[0].name)
            tallies.add(place, _grown([_without_receives(entry) for entry in each], probe.more))
        received = {event for each in found for entry in each for event in entry.events if is_receive(event)}
        if len(received) > 2:
            raise NotSteady("what is received differs")
        missing = outside_passes(
            self.design, rank=rank, microbatches=plan.schedule.microbatches - few[0].plan.schedule.microbatches
        )
        step = tallies.in_order(self._order(rank), receive=tally(received), missing=missing)
        return self._found(rank, step, probed=True)

    def _order(self, rank: int) -> list[str]:
        """The places of all passes, and RECEIVE between them, in the order of the step."""
        plan = self.design.plan
        if plan.pipeline > 1:
            return [name if name == RECEIVE else _place(plan, name) for name in self._orders.of(rank)]
        return [f"{LineName.FORWARD}|0", f"{LineName.BACKWARD}|0"] * plan.schedule.microbatches

    def _traced(self, design: Design, rank: int) -> tuple[Event, ...]:
        """Of ranks whose stages have the same content, and run it in the same order, one is traced."""
        plan = design.plan
        ordered = plan.schedule == self.design.plan.schedule and plan.pipeline > 1
        if is_split(plan) and not ordered:
            design = replace(design, plan=replace(plan, schedule=split(plan, rank=rank)))
        key = f"{content(design, rank)} {design.plan.schedule} {rank if ordered else 0}"
        if key not in self._known:
            layers, microbatches = len(design.model.layers), plan.schedule.microbatches
            self.say(f"pipeline rank {rank}: tracing {layers} layers, {microbatches} microbatches")
            self._known[key] = traced(design, rank=heaviest(plan, rank), recipes=self._recipes)
        return self._known[key]


def _place(plan: Plan, name: str) -> str:
    """The name of a stretch with its stage's place on its rank instead of the stage, and without the microbatch."""
    parts = name.split("|")
    if len(parts) != 3:
        return name
    stage = int(parts[1])
    chunk = plan.stages_of(plan.stages[stage].rank).index(stage) if stage >= 0 else -1
    return f"{parts[0]}|{chunk}"


def _without_receives(stretch: Stretch) -> Stretch:
    """What is received comes in an order of its own."""
    kept = tuple(event for event in stretch.events if not is_receive(event))
    return Stretch(name=stretch.name, events=kept)


def _grown(probes: Sequence[Stretch], more: int) -> Tally:
    if len(probes) == 1:
        return tally(probes[0].events)
    first, second, third = (probe.events for probe in probes)
    if probes[0].name == "held":
        return grown((tally(first), tally(second), tally(third)), more)
    return extended((first, second, third), more)
