"""The stages of a plan in words: each by itself where they are few, else by how many blocks follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

_FEW = 4  # stages that are told one by one


def stage_words(stages: Sequence[tuple[int, int, int]]) -> str:
    """`blocks 0 to 16 on rank 0, 17 to 33 on rank 1` of (rank, start, stop); of more stages than a few `34 stages of 1
    block, on ranks 0 to 1 in turn`. Other stages have other words."""
    if len(stages) <= _FEW:
        told = (f"{_blocks(start, stop)} on rank {rank}" for rank, start, stop in stages)
        return f"{'block' if stages[0][2] - stages[0][1] == 1 else 'blocks'} {', '.join(told)}"
    sizes, ranks = [stop - start for _, start, stop in stages], [rank for rank, _, _ in stages]
    return f"{len(stages)} stages of {size_words(sizes)}, on {rank_order_words(ranks)}"


def _blocks(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start} to {stop - 1}"


def size_words(sizes: Sequence[int]) -> str:
    """`3 blocks` of equal sizes, else runs of them in order: `2, 1 x 32, 2 blocks`."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    if len(runs) == 1:
        return f"{sizes[0]} block{'' if sizes[0] == 1 else 's'}"
    return f"{', '.join(f'{size} x {count}' if count > 1 else str(size) for size, count in runs)} blocks"


def rank_order_words(ranks: Sequence[int]) -> str:
    """`ranks 0 to 7 in turn`, `ranks 0 to 7 there and back`, or all of them in order."""
    most = max(ranks) + 1
    turn = 2 * most
    span = "rank 0" if most == 1 else f"ranks 0 to {most - 1}"
    if all(rank == at % most for at, rank in enumerate(ranks)):
        return span if most == 1 else f"{span} in turn"
    if all(rank == min(at % turn, turn - 1 - at % turn) for at, rank in enumerate(ranks)):
        return f"{span} there and back"
    return f"ranks {', '.join(map(str, ranks))}"
