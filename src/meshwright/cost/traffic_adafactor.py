"""What Adafactor sums so that the means of a matrix, and the size of its update, are of the whole."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from meshwright.cost.traffic_groups import Group
from meshwright.cost.traffic_parameters import Part
from meshwright.spec.optimizer import Adafactor, Optimizer, Treatment, treatment

Summed = tuple[Group, float]


def sums(parts: Sequence[Part], spec: Optimizer, *, apart: str | None) -> Iterator[Summed]:
    """(group, elements) of every all-reduce of the first rank of all groups; parameters treated alike go together, but
    for those that are called `apart`."""
    chosen: dict[tuple[Treatment, int | None], list[Part]] = {}
    for place, part in enumerate(parts):
        alone = place if part.name == apart else None
        chosen.setdefault((treatment(spec, part.name), alone), []).append(part)
    for (how, _), alike in chosen.items():
        if isinstance(how.rule, Adafactor):
            for each in (_squares, _means, _sizes):
                yield from _together([pair for part in alike for pair in each(part)])


def _together(pairs: Sequence[Summed]) -> Iterator[Summed]:
    found: dict[Group, float] = defaultdict(float)
    for group, elements in pairs:
        found[group] += elements
    yield from found.items()


def _squares(part: Part) -> Iterator[Summed]:
    """Of rows over the ranks that divide them, and of columns."""
    if len(part.shape) > 1:
        elements = math.prod(part.shape)
        yield from ((group, elements / part.shape[-1]) for group in _across(part, 1))
        yield from ((group, elements / part.shape[-2]) for group in _across(part, 2))


def _means(part: Part) -> Iterator[Summed]:
    """A number for every matrix, over the ranks that divide its columns."""
    if len(part.shape) > 1:
        yield from ((group, math.prod(part.shape[:-2])) for group in _across(part, 2))


def _sizes(part: Part) -> Iterator[Summed]:
    """A number for every matrix or vector, over all ranks that divide it."""
    yield from ((group, math.prod(part.shape[:-2])) for place in (1, 2) for group in _across(part, place))


def _across(part: Part, place: int) -> Iterator[Group]:
    """The groups that divide the dim at this place from the end."""
    return (cut.group for cut in part.cuts if cut.dim == len(part.shape) - place)
