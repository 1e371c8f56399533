"""What the block groups of a plan are told as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec.plan import BlockGroup


def sharding_words(group: BlockGroup) -> str:
    """`zero3`, or `zero3 over 4` where the group says over how many ranks."""
    return group.sharding.value + ("" if group.shards is None else f" over {group.shards}")


def words_of(groups: Sequence[BlockGroup], name: str) -> list[str]:
    """What groups have in field `name`: `full`, or where blocks differ `full in 12 blocks`; nothing of none."""
    counts: dict[str, int] = {}
    for group in groups:
        word = sharding_words(group) if name == "sharding" else str(getattr(group, name).value)
        counts[word] = counts.get(word, 0) + group.stop - group.start
    order = [kind.value for kind in type(getattr(groups[0], name))]
    words = sorted((word for word in counts if word != "none"), key=lambda word: order.index(word.split()[0]))
    return [word + ("" if len(counts) == 1 else f" in {counts[word]} blocks") for word in words]
