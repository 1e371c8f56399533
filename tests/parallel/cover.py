"""Few of many draws that meet every pair of choices that all of them meet, as far as few can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any, TypeVar

from meshwright.spec.plan import AxisName
from tests.parallel.adding import counts_parts, is_whole
from tests.parallel.draws import Draw
from tests.support.designs import SEQUENCE

Item = TypeVar("Item")
Two = TypeVar("Two", bound=tuple[Any, ...])


def choices(draw: Draw) -> dict[str, object]:
    """What a draw chose, by dimension; of what has many forms, whether it has any."""
    plain = asdict(draw if is_whole(draw) else replace(draw, slices=1))
    if counts_parts(draw):
        plain["routing"] = "own"
    for name in ("axes", "bounds", "recompute", "layers", "exchange", "gradients", "shards", "offloads"):
        del plain[name]
    some = ("extents", "kinds", "placement", "empty_rows", "fewer", "table", "kv_heads")
    plain |= {name: bool(plain[name]) for name in some}
    plain["vocab"] = draw.vocab == Draw().vocab
    kind, inner, layout = draw.exchange
    names = [name for name, _ in draw.axes]
    sizes = {name.value: draw.size(name) for name in AxisName}
    usual = names == [name.value for name in AxisName if name.value in names]
    mixed = "mixed" if len(set(draw.recompute)) > 1 else draw.recompute[0]
    meeting = {"meeting": kind, "inner": inner, "layout": layout}
    frozen = "none" if not draw.frozen else "first" if draw.frozen == tuple(range(len(draw.frozen))) else "some"
    own = {"recompute": mixed, "frozen": frozen, "sharding": "unlike" if draw.shards else draw.sharding}
    own |= {"offload": "unlike" if draw.offloads else draw.offload}
    return {**plain, **sizes, **meeting, "usual order": usual, **own}


def values(draws: Sequence[Draw]) -> dict[str, set[object]]:
    """What all of them chose, by dimension, those of layers and blocks one by one."""
    found: dict[str, set[object]] = {"ranks": {draw.ranks for draw in draws}}
    for draw in draws:
        for name, value in choices(draw).items():
            found.setdefault(name, set()).add(value)
    found["gradients"] = {draw.gradients for draw in draws}
    for name in ("kinds", "offloads", "shards", "extents"):
        found[name] = set().union(*(getattr(draw, name) for draw in draws))
    return found


def effort(draw: Draw) -> float:
    """About how long a draw takes, in seconds of one processor."""
    layers = draw.layers / draw.size(AxisName.PIPELINE)
    passes = layers * draw.steps * draw.length / SEQUENCE * 0.03 * draw.microbatches * max(1.0, 0.5 * draw.slices)
    return draw.ranks * (0.3 + 0.05 * layers + passes)


def covering(draws: list[Draw], *, count: int) -> list[Draw]:
    """`count` of the draws, each the one that meets the most new pairs of choices for its effort."""
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
        best = max(left, key=lambda item: len(left[item]) / cost(item))
        met = left.pop(best)
        for pairs in left.values():
            pairs -= met
        found.append(best)
    return found
