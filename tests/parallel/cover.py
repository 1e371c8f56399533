"""Few of many draws that meet every pair of choices that all of them meet, as far as few can."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any, TypeVar

from meshwright.spec.plan import AxisName
from tests.parallel.drawing import counts_parts, is_whole
from tests.parallel.draws import Draw

Item = TypeVar("Item")
Two = TypeVar("Two", bound=tuple[Any, ...])


def choices(draw: Draw) -> dict[str, object]:
    """What a draw chose, by dimension; what is added by the draw alone (`_prefix` and after) is none."""
    plain = asdict(draw if is_whole(draw) else replace(draw, slices=1))
    if counts_parts(draw):
        plain["routing"] = "own"
    for name in (
        "axes",
        "bounds",
        "recompute",
        "frozen",
        "layers",
        "exchange",
        "table",
        "prefix",
        "factored",
        "shards",
        "extents",
        "vocab",
        "kv_heads",
        "fewer",
        "moments",
        "gradients",
    ):
        del plain[name]
    kind, inner, layout = draw.exchange
    names = [name for name, _ in draw.axes]
    sizes = {name.value: draw.size(name) for name in AxisName}
    usual = names == [name.value for name in AxisName if name.value in names]
    mixed = "mixed" if len(set(draw.recompute)) > 1 else draw.recompute[0]
    meeting = {"meeting": kind, "inner": inner, "layout": layout}
    frozen = "none" if not draw.frozen else "first" if draw.frozen == tuple(range(len(draw.frozen))) else "some"
    own = {"recompute": mixed, "frozen": frozen, "sharding": "unlike" if draw.shards else draw.sharding}
    return {**plain, **sizes, **meeting, "usual order": usual, **own}


def effort(draw: Draw) -> float:
    """About how long a draw takes, in seconds of one processor."""
    layers = draw.layers / draw.size(AxisName.PIPELINE)
    return draw.ranks * (0.3 + layers * (0.05 + 0.03 * draw.microbatches * max(1.0, 0.5 * draw.slices)))


def covering(draws: list[Draw], *, count: int) -> list[Draw]:
    """`count` of the draws, each the one that meets the most new pairs of choices for the root of its effort."""
    return _covering(draws, choices, effort, count=count)


def covering_pairs(pairs: Sequence[Two], *, count: int) -> list[Two]:
    """The same of pairs of draws, and what else they have: choices of the first are met with those of the second."""

    def chosen(pair: Two) -> dict[str, object]:
        return {f"{place} {name}": value for place in (0, 1) for name, value in choices(pair[place]).items()}

    return _covering(pairs, chosen, lambda pair: effort(pair[0]) + effort(pair[1]), count=count)


def _covering(
    items: Sequence[Item], chosen: Callable[[Item], dict[str, object]], cost: Callable[[Item], float], *, count: int
) -> list[Item]:
    left, found = {item: set(combinations(chosen(item).items(), 2)) for item in items}, []
    for _ in range(count):
        best = max(left, key=lambda item: len(left[item]) / math.sqrt(cost(item)))
        met = left.pop(best)
        for pairs in left.values():
            pairs -= met
        found.append(best)
    return found
