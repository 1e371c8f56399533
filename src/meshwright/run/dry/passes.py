"""Passes of a pipeline rank: what each does, early ones told apart, and all of them in the order of the step."""

from __future__ import annotations

from collections import defaultdict

from meshwright.run.dry.extend import NotSteady
from meshwright.run.dry.marks import SPLIT
from meshwright.run.dry.order import RECEIVE, order_of
from meshwright.run.dry.shrink import FEWEST_MICROBATCHES
from meshwright.run.dry.tally import Tally, joined
from meshwright.spec.plan import Plan
from meshwright.spec.report import LineName

_ALIKE = 2  # passes one after another that have to be the same for those that follow to be


class Passes:
    """Stretches by `pass|place` of a stage on its rank, in the order of their microbatches."""

    def __init__(self) -> None:
        self._found: dict[str, list[Tally]] = defaultdict(list)

    def add(self, place: str, stretch: Tally) -> None:
        self._found[place].append(stretch)

    def in_order(self, plan: Plan, rank: int, *, receive: Tally) -> Tally:
        """All of a step, `receive` where room is made for what is received.

        Raises NotSteady where passes between the early and the last ones differ.
        """
        done: dict[str, int] = defaultdict(int)
        left = dict(self._found)
        order = [name if name == RECEIVE else _placed(plan, name) for name in _order(plan, rank)]
        number = {place: order.count(place) for place in set(order)}
        found = [*left.pop("held", []), *left.pop("begin", [])]
        before = ""
        for place in order:
            if place == RECEIVE:
                found.append(receive)
                continue
            after = f"after {before}"
            # What ends the step begins where its last pass ended.
            if after in self._found and not place.startswith(LineName.GRADIENTS):
                found.append(self._of(after, done[before] - 1, number[before]))
            found.append(self._of(place, done[place], number[place]))
            done[place] += 1
            before = place
        for place in {*order, *(f"after {name}" for name in order)}:
            left.pop(place, None)
        ends = (stretch for place, several in left.items() if SPLIT not in place for stretch in several)
        return joined([*found, *ends])

    def _of(self, place: str, index: int, number: int) -> Tally:
        several = self._found[place]
        # The last half of a step has a name of its own; of other passes it is the one beyond these.
        early = several if SPLIT in place else several[: FEWEST_MICROBATCHES - 1]
        if len(several) == 1 or (index == number - 1 and SPLIT not in place):
            return several[-1]
        if index < len(early):
            return early[index]
        if len(early) < _ALIKE or early[-1] != early[-_ALIKE]:
            raise NotSteady(place)
        return early[-1]


def _order(plan: Plan, rank: int) -> tuple[str, ...]:
    if plan.pipeline > 1:
        return order_of(plan, rank=rank)
    passes = (LineName.FORWARD, LineName.BACKWARD)
    return tuple(f"{name}|0|{index}" for index in range(plan.schedule.microbatches) for name in passes)


def _placed(plan: Plan, name: str) -> str:
    """The name of a stretch with the place of its stage on its rank, and without the microbatch."""
    what, stage, _ = name.split("|")
    index = int(stage)
    held = [entry.rank for entry in plan.stages[:index]]
    return f"{what}|{held.count(plan.stages[index].rank)}"
