"""Waiting: what a rank was in when it lost another one, and who never came, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.spec.errors import Problem
from meshwright.spec.rank_words import MOST_NAMED, ranks_in_words
from meshwright.train.observe.whereabouts import Whereabouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A rank waited in `collective`, words that name it, at `where` in its step; `timed_out` where for too long."""

    where: str
    collective: str
    timed_out: bool


def waiting_of(error: BaseException, *, now: Whereabouts) -> Waiting:
    """What this process waits in, which has just lost another one with `error`."""
    from meshwright.run.torch_compat import last_entered

    entered, text = last_entered(), str(error).lower()
    collective = ""
    if entered is not None:
        collective = f"{entered.operation} {entered.number:,} of {ranks_in_words(entered.ranks)}"
    return Waiting(where=str(now), collective=collective, timed_out="timed out" in text or "timeout" in text)


def never_came(
    missing: Sequence[int], *, waited: Sequence[tuple[int, Waiting]], last_seen: Mapping[int, Whereabouts]
) -> Problem:
    """Ranks `missing` were waited for in vain by `waited`."""
    if not missing:
        return Problem(
            what="ranks waited in vain for each other",
            why=told_waits(waited),
            fix="see that every node reaches the others; --resume goes on",
        )
    seen = [f"rank {rank} was last seen in {last_seen[rank]}" for rank in missing[:MOST_NAMED] if rank in last_seen]
    return Problem(
        what=f"{ranks_in_words(missing)} did not come to where the others waited: hung or stopped",
        why="; ".join((told_waits(waited), *seen)),
        fix="see RUN/logs and the log of its machine for why; --resume goes on",
    )


def told_waits(waited: Sequence[tuple[int, Waiting]]) -> str:
    """`rank 0 waited in all_reduce 12 of ranks 0 and 1 (step 4, optimizer)`: alike ones together."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, waiting in waited:
        alike.setdefault((waiting.collective or "a collective", waiting.where), []).append(rank)
    told = [f"{ranks_in_words(sorted(ranks))} waited in {what} ({where})" for (what, where), ranks in alike.items()]
    return "; ".join(told[:MOST_NAMED])
