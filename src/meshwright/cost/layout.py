"""Layout: which blocks each stage of a plan holds, and what is said of blocks one by one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Which blocks each stage holds and which pipeline rank holds each stage.

    Stage s is blocks [bounds[s], bounds[s + 1]); `ranks[s]` is its pipeline rank. `policies` holds indexes into
    RECOMPUTES and OFFLOADS for every block, in place of the row's; () where the row's hold for all. `frozen` blocks
    are not trained. `table` is what ranks do where the schedule is a table, `paths` what stages its microbatches pass,
    as in Schedule.
    """

    bounds: tuple[int, ...]
    ranks: tuple[int, ...]
    policies: tuple[tuple[int, int], ...] = ()
    frozen: frozenset[int] = frozenset()
    table: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def pipeline(self) -> int:
        return max(self.ranks) + 1

    @property
    def loops(self) -> bool:
        """Whether stages go round all ranks, one after another; those of V shapes turn at the last one."""
        return all(rank == stage % self.pipeline for stage, rank in enumerate(self.ranks))
