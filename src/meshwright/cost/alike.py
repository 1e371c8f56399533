"""Which ranks of a plan hold the same parameters, element by element."""

from __future__ import annotations

from meshwright.cost.holdings import Box, Contents, holdings
from meshwright.spec.plan import Design


def alike(design: Design) -> tuple[tuple[int, ...], ...]:
    """Ranks in groups of two and more that hold the same part of every parameter and buffer, in order."""
    held: list[list[tuple[str, Box]]] = [[] for _ in range(design.plan.world_size)]
    for name, holding in holdings(design, contents=Contents.PARAMETERS).items():
        for rank, part in holding.parts.items():
            held[rank].append((name, part))
    groups: dict[tuple[tuple[str, Box], ...], list[int]] = {}
    for rank, parts in enumerate(held):
        groups.setdefault(tuple(parts), []).append(rank)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
