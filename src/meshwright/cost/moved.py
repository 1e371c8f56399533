"""The least that a move of state can send: what every process needs and does not hold, counted once.

Nothing here knows how bytes travel: what a move counts of itself is held against this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright.cost.holdings import OPTIMIZER, PARAMETERS, Box, Holding
from meshwright.spec.errors import Problem


def least_bytes(source: Mapping[str, Holding], target: Mapping[str, Holding]) -> dict[int, int]:
    """Bytes that each process of `target` has to be sent, by process; those that need nothing are left out.

    Each byte that a process needs and has no copy of has to come to it once, from wherever: no way of sending does with
    fewer, and a rank that passes on what came to it needs no more.
    """
    found: dict[int, int] = {}
    for name, wanted in target.items():
        held = source[name]
        for process, box in wanted.parts.items():
            missing = box.elements - sum(_common(box, kept) for kept in held.of(process))
            if missing:
                found[process] = found.get(process, 0) + missing * held.item_bytes
    return found


def least_crossing_bytes(source: Mapping[str, Holding], target: Mapping[str, Holding], *, nodes: Sequence[int]) -> int:
    """Bytes that have to enter a node, over all nodes: what its processes need and none of them holds, once.

    `nodes[p]` is the node of process p.
    """
    total = 0
    for name, wanted in target.items():
        held = source[name]
        here: dict[int, list[Box]] = {}
        for process, box in held.boxes:
            here.setdefault(nodes[process], []).append(box)
        needed: dict[int, list[Box]] = {}
        for process, box in wanted.parts.items():
            needed.setdefault(nodes[process], []).append(box)
        for node, boxes in needed.items():
            union = _union([*boxes, *here.get(node, ())])
            total += (union - _union(here.get(node, []))) * held.item_bytes
    return total


def unfit(
    source: Mapping[str, Holding], target: Mapping[str, Holding], *, names: tuple[str, str] = ("source", "target")
) -> tuple[Problem, ...]:
    """Why what `target` has cannot be made of what `source` has, called by their `names`; () when it can.

    An optimizer's state that the target has no place for is left behind, and what it keeps of parameters that the
    source does not train is new (`afresh`).
    """
    return (
        *_other_model(source, target, names=names),
        *_other_optimizer(source, target, names=names),
        *_lost(source, target, side=names[0]),
    )


def afresh(source: Mapping[str, Holding], target: Mapping[str, Holding]) -> frozenset[str]:
    """The state of `target` that is zero, as before a first step: that of parameters of which an optimizer of `source`
    keeps nothing while it keeps some of others, since they were frozen."""
    trained = {_parameter(name) for name in source if name.startswith(OPTIMIZER)}
    new = (name for name in target if name.startswith(OPTIMIZER) and _parameter(name) not in trained)
    return frozenset(new if trained else ())


def _parameter(name: str) -> str:
    """Whose state `name` is of."""
    return name.removeprefix(OPTIMIZER).rpartition(".")[0]


def _other_model(
    source: Mapping[str, Holding], target: Mapping[str, Holding], *, names: tuple[str, str]
) -> Iterator[Problem]:
    fix = "move between plans of one model"
    ours, theirs = ([name for name in side if name.startswith(PARAMETERS)] for side in (source, target))
    for side, wanted, other in ((names[0], theirs, source), (names[1], ours, target)):
        absent = [name.removeprefix(PARAMETERS) for name in wanted if name not in other]
        if absent:
            more = f" and {len(absent) - 1:,} more" if len(absent) > 1 else ""
            yield Problem(what=f"the {side} has no {absent[0]}{more}", where="state", fix=fix)
    for name in theirs:
        if name in source and source[name].shape != target[name].shape:
            what = f"{name.removeprefix(PARAMETERS)} is {source[name].shape}, the {names[1]} has {target[name].shape}"
            yield Problem(what=what, where="state", fix=fix)


def _other_optimizer(
    source: Mapping[str, Holding], target: Mapping[str, Holding], *, names: tuple[str, str]
) -> Iterator[Problem]:
    new = afresh(source, target)
    absent = [name for name in target if name.startswith(OPTIMIZER) and name not in source and name not in new]
    if not absent:
        return
    if not any(name.startswith(OPTIMIZER) for name in source):
        fix = f"give the {names[0]}'s optimizer state, or move parameters alone"
        yield Problem(what=f"the {names[0]} has no optimizer state", where="state", fix=fix)
        return
    parameter = _parameter(absent[0])
    if f"{PARAMETERS}{parameter}" in source:
        ours, theirs = (", ".join(_fields(side, parameter)) or "nothing" for side in (source, target))
        what = f"the {names[0]}'s optimizer keeps {ours} of {parameter}, the {names[1]}'s {theirs}"
        yield Problem(what=what, where="state", fix="move between plans of one optimizer")


def _fields(held: Mapping[str, Holding], parameter: str) -> list[str]:
    before = f"{OPTIMIZER}{parameter}."
    return [name.removeprefix(before) for name in held if name.startswith(before)]


def _lost(source: Mapping[str, Holding], target: Mapping[str, Holding], *, side: str) -> Iterator[Problem]:
    """What is needed and nobody holds."""
    known: dict[tuple[int, int, int], bool] = {}
    for name, wanted in target.items():
        held = source.get(name)
        if held is None or held.shape != wanted.shape:
            continue
        key = id(held.parts), id(held.spares), id(wanted.parts)
        if key not in known:
            kept = [box for _, box in held.boxes]
            known[key] = _union([*kept, *wanted.parts.values()]) > _union(kept)
        if known[key]:
            what = f"the {side} does not hold all of {name}"
            yield Problem(what=what, where="state", fix="load a whole checkpoint")


def _common(box: Box, other: Box) -> int:
    met = box.meet(other)
    return 0 if met is None else met.elements


def _union(boxes: Sequence[Box]) -> int:
    """Elements that any of `boxes` has."""
    rest, total = list(dict.fromkeys(boxes)), 0
    while rest:
        box = rest.pop()
        total += box.elements
        rest = [piece for other in rest for piece in _less(other, box)]
    return total


def _less(box: Box, taken: Box) -> list[Box]:
    """`box` without what `taken` has of it, in disjoint boxes."""
    met = box.meet(taken)
    if met is None:
        return [box]
    pieces = []
    for dim in range(len(box.sizes)):
        before = met.starts[dim] - box.starts[dim]
        after = box.stops[dim] - met.stops[dim]
        if before:
            pieces.append(box.along(dim, first=0, size=before))
        if after:
            pieces.append(box.along(dim, first=box.sizes[dim] - after, size=after))
        box = box.along(dim, first=before, size=met.sizes[dim])
    return pieces
