"""Passes of a pipeline rank: what each does, early ones told apart, and all of them in the order of the step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from meshwright.run.dry.events import Event, Kind
from meshwright.run.dry.extend import NotSteady
from meshwright.run.dry.names import RECEIVE, SPLIT
from meshwright.run.dry.tally import Amounts, Tally, joined, tally
from meshwright.run.dry.trace import GRADIENTS, OutsidePasses
from meshwright.spec.report import LineName, MemoryPart


class Passes:
    """Stretches by `pass|place` of a stage on its rank, in the order of their microbatches. The `early` ones are told
    apart, and the last of those stands for all that follow but the last of all, where so many as are to be `alike` are.
    """

    def __init__(self, *, early: int, alike: int) -> None:
        self._early, self._alike = early, alike
        self._found: dict[str, list[Tally]] = defaultdict(list)

    def add(self, place: str, stretch: Tally) -> None:
        self._found[place].append(stretch)

    def in_order(self, order: Sequence[str], *, receive: Tally, missing: OutsidePasses, left: Amounts) -> Tally:
        """All of a step whose passes come in the order of the places in `order`, `receive` where room is made for what
        is received; `missing` is of microbatches that were left out.

        Raises NotSteady where passes between the early and the last ones differ, and where the step takes any more than
        it gives back but for what is `left` to the next one by part, as counts of experts are.
        """
        done: dict[str, int] = defaultdict(int)
        others = dict(self._found)
        number = Counter(order)
        held = [*others.pop("held"), _taken(MemoryPart.BUFFERS, missing.held)]
        found = [*others.pop("begin", []), _taken(MemoryPart.ACTIVATIONS, missing.cut)]
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
        found.append(_taken(MemoryPart.ACTIVATIONS, -missing.losses))
        for place in {*order, *(f"after {name}" for name in order)}:
            others.pop(place, None)
        for place, several in others.items():
            found += several if SPLIT not in place else []
            found += [_taken(MemoryPart.ACTIVATIONS, -missing.cut)] if place == GRADIENTS else []
        step = joined(found)
        if {part: amount for part, amount in step.net.items() if amount} != dict(left):
            raise NotSteady("the step does not give back what it took")
        return joined([*held, step])

    def _of(self, place: str, index: int, number: int) -> Tally:
        several = self._found[place]
        # The last half of a step has a name of its own; of other passes it is the one beyond these.
        early = several if SPLIT in place else several[: self._early]
        if len(several) == 1 or (index == number - 1 and SPLIT not in place):
            return several[-1]
        if index < len(early):
            return early[index]
        if len(early) < self._alike or early[-1] != early[-self._alike]:
            raise NotSteady(place)
        return early[-1]


def _taken(part: MemoryPart, num_bytes: float) -> Tally:
    return tally([Event(Kind.MEMORY, part.value, num_bytes)])
