"""Ranks in words."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMED = 8


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 1`, `ranks 0, 1, 2 and 13 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3:,} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "some ranks"
