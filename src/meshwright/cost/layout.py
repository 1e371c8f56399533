"""Layout: which blocks each stage of a plan holds, and what is said of blocks one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.spec.plan import BlockGroup, Offload, Recompute, Sharding

_RECOMPUTES, _OFFLOADS, _SHARDINGS = tuple(Recompute), tuple(Offload), tuple(Sharding)


class Policy(NamedTuple):
    """What is done with one block, as indexes into RECOMPUTES, OFFLOADS and SHARDINGS; `shards` as of its group, 0
    those of the row."""

    recompute: int
    offload: int
    sharding: int
    shards: int = 0

    @classmethod
    def of(cls, group: BlockGroup) -> Policy:
        recompute, offload = _RECOMPUTES.index(group.recompute), _OFFLOADS.index(group.offload)
        sharding = _SHARDINGS.index(group.sharding)
        return cls(recompute=recompute, offload=offload, sharding=sharding, shards=group.shards or 0)

    def given(self, group: BlockGroup) -> BlockGroup:
        """`group` with this done to its blocks."""
        recompute, offload = _RECOMPUTES[self.recompute], _OFFLOADS[self.offload]
        sharding, shards = _SHARDINGS[self.sharding], self.shards or None
        return replace(group, recompute=recompute, offload=offload, sharding=sharding, shards=shards)


def sharded_unlike(policies: tuple[Policy, ...]) -> bool:
    """Whether blocks under `policies` are sharded in unlike ways, or over other ranks than the row's."""
    return len({policy.sharding for policy in policies}) > 1 or any(policy.shards for policy in policies)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which blocks each stage holds and which pipeline rank holds each stage.

    Stage s is blocks [bounds[s], bounds[s + 1]); `ranks[s]` is its pipeline rank. `policies` are of every block, in
    place of the row's; () where the row's hold for all. `frozen` blocks are not trained. `table` is what ranks do where
    the schedule is a table, `paths` what stages its microbatches pass, as in Schedule.
    """

    bounds: tuple[int, ...]
    ranks: tuple[int, ...]
    policies: tuple[Policy, ...] = ()
    frozen: frozenset[int] = frozenset()
    table: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def shards_unlike(self) -> bool:
        """Whether blocks differ in what is sharded of them, or over how many ranks."""
        return sharded_unlike(self.policies)

    @property
    def pipeline(self) -> int:
        return max(self.ranks) + 1

    @property
    def loops(self) -> bool:
        """Whether stages go round all ranks, one after another; those of V shapes turn at the last one."""
        return all(rank == stage % self.pipeline for stage, rank in enumerate(self.ranks))
