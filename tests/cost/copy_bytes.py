"""What copies in memory take, counted from what each rank of a plan holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.cost.copies import SLOTS, Neighbours, alone, copied
from meshwright.cost.holdings import Box, Holding
from meshwright.spec.plan import Design


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBytes:
    """Of the rank that has most: what a copy holds of its own and of its neighbour, which is what it is sent."""

    own: int
    kept: int

    @property
    def held(self) -> int:
        """In the host's memory, all copies together."""
        return SLOTS * (self.own + self.kept)


def copy_bytes(design: Design) -> CopyBytes:
    """What copies of `design` take on the rank where they take most."""
    held, ranks, near = copied(design), design.plan.world_size, Neighbours.of(design)
    parts = [{name: one.parts[rank] for name, one in held.items() if rank in one.parts} for rank in range(ranks)]
    own = [_bytes(held, mine) for mine in parts]
    for_others = ranks > 1 and not design.plan.gradients.kind.has_learners
    sole = [_bytes(held, alone(held, rank, together=near.together)) if for_others else 0 for rank in range(ranks)]
    kept = [sole[near.kept_by(rank)] for rank in range(ranks)]
    most = max(range(ranks), key=lambda rank: own[rank] + kept[rank])
    return CopyBytes(own=own[most], kept=kept[most])


def _bytes(held: Mapping[str, Holding], boxes: Mapping[str, Box]) -> int:
    return sum(box.elements * held[name].item_bytes for name, box in boxes.items())
