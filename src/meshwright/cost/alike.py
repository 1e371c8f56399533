"""Which ranks of a plan hold the same parameters, element by element."""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost.holdings import Box, Contents, holdings
from meshwright.spec.plan import Design


def alike(design: Design) -> tuple[tuple[int, ...], ...]:
    """Ranks in groups of two and more that hold the same part of every parameter and buffer after every step: replicas,
    but no other learners."""
    own = replace(design, plan=design.plan.of_learner())
    held: list[list[tuple[str, Box]]] = [[] for _ in range(own.plan.world_size)]
    for name, holding in holdings(own, contents=Contents.PARAMETERS).items():
        for rank, part in holding.parts.items():
            held[rank].append((name, part))
    groups: dict[tuple[tuple[str, Box], ...], list[int]] = {}
    for rank, parts in enumerate(held):
        groups.setdefault(tuple(parts), []).append(rank)
    learners = [design.plan.ranks_of_learner(learner) for learner in range(design.plan.learners)]
    return tuple(
        tuple(ranks[rank] for rank in group) for ranks in learners for group in groups.values() if len(group) > 1
    )
