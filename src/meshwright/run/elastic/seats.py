"""Seats: which worker has which rank of a new epoch, and which learner of it goes on as which of the one before."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshwright.cost.copies import copied
from meshwright.cost.holdings import Holding
from meshwright.cost.learner_holdings import Origins, learner_holdings
from meshwright.spec.plan import Design, Plan


def seated(
    now: Plan, names: Sequence[str], *, before: Plan, had: Sequence[str], left: Collection[str]
) -> tuple[str, ...]:
    """The members of an epoch by the plan `now`, in the order of its places: the workers `names`, in the order of the
    devices of a plan for them. Of those that the plan before `had`, some are `left`. Learners all of whose ranks are
    stay together and come first; who is left of a learner that is not may have a rank of a new one, and else none.
    """
    if not now.gradients.kind.has_learners:
        return tuple(names)
    whole = [learner for learner in _learners(before, had) if set(learner) <= set(left)]
    kept = [name for learner in whole for name in learner]
    rest = [name for name in names if name not in kept]
    seats = kept + sorted(rest, key=lambda name: name not in left)
    each, found = now.world_size // now.learners, dict[int, str]()
    for learner in range(now.learners):
        for place, name in enumerate(seats[learner * each : (learner + 1) * each]):
            found[now.ranks_of_learner(learner)[place]] = name
    return tuple(found[now.rank_on(device)] for device in range(now.world_size))


def origins(
    now: Plan, members: Sequence[str], *, before: Plan, had: Sequence[str], holders: Collection[str]
) -> Origins:
    """Which of the learners before each one is, all of whose workers are `holders` of what it had: None where it is
    none of them."""
    if not now.gradients.kind.has_learners:
        return ()
    known = {names: learner for learner, names in enumerate(_learners(before, had)) if set(names) <= set(holders)}
    return tuple(known.get(names) for names in _learners(now, members))


def wanted(design: Design, found: Origins) -> dict[str, Holding] | None:
    """What an epoch by `design`, whose learners have these origins, needs of a copy; None where none of it is left."""
    if not design.plan.gradients.kind.has_learners:
        return copied(design)
    return learner_holdings(design, origins=found) if any(origin is not None for origin in found) else None


def waiting(members: Collection[str], *, left: Collection[str]) -> str:
    """Who is left and has no rank, in words; empty where all have one."""
    count = sum(name not in members for name in left)
    return f"{count} of a learner that is not whole wait{'s' * (count == 1)} for others" if count else ""


def _learners(plan: Plan, members: Sequence[str]) -> list[tuple[str, ...]]:
    """The workers of each learner, in the order of its ranks."""
    by_rank = {plan.rank_on(device): name for device, name in enumerate(members)}
    return [tuple(by_rank[rank] for rank in plan.ranks_of_learner(learner)) for learner in range(plan.learners)]
