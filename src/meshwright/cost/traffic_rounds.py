"""Every collective by which learners meet in one round, rank by rank, with its bytes, as our own runtime makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.cost.holdings import PARAMETERS, Contents, holdings
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import AxisName, Design, Plan
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import PACKINGS, TOLD_BYTES, TOLD_EVERY, SyncKind, dealt
from meshwright.spec.tensors import prefix, tensors

# What learners tell each other is all that crosses them beside fragments.
TELLING = f"{LineName.OTHER.value}|all_reduce|{AxisName.REPLICATE.value}"
_STEPS_BYTES = 8.0  # of a number of steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCollective:
    """`calls` collectives a round among `ranks`, each of whole tensors of `bytes`: the input of an all-reduce or an
    all-to-all, the output of an all-gather. `fragment` is the part of the model that travels, None of the numbers that
    learners tell each other.
    """

    operation: str
    ranks: tuple[int, ...]
    bytes: float
    calls: float = 1.0
    fragment: int | None = None


def round_traffic(design: Design, *, rank: int) -> tuple[RoundCollective, ...]:
    """What `rank` sends in one round to meet those that hold the same in other learners; () where there is one.

    Fragments are whole blocks of the model; of one that the rank holds nothing of it sends nothing. Where a quorum ends
    rounds, learners tell each other nothing in a group.
    """
    plan = design.plan
    if plan.learners == 1:
        return ()
    rounds, peers = plan.gradients.rounds, ranks_across(plan, rank)
    found = []
    for fragment, elements in enumerate(fragment_elements(design, rank=rank)):
        found += [
            RoundCollective(operation=operation, ranks=peers, bytes=each, fragment=fragment)
            for operation, each in _sent(elements, learners=plan.learners, precision=rounds.precision)
        ]
    if rounds.quorum:
        return tuple(found)
    told = rounds.every / min(rounds.every, TOLD_EVERY)
    return (*found, RoundCollective(operation="all_reduce", ranks=peers, bytes=float(TOLD_BYTES), calls=told))


def agreed_bytes(design: Design, *, rank: int) -> float:
    """Bytes of what the ranks of one learner sum among themselves in a round, as `rank` takes part in it: co2's two
    norms of every fragment, and how many steps a round is to have, where that may change."""
    gradients, norms = design.plan.gradients, 0.0
    if gradients.kind is SyncKind.CO2:
        parts = sum(elements > 0 for elements in fragment_elements(design, rank=rank))
        wide = 8.0 if design.plan.first_group.precision is Precision.FP64 else 4.0
        norms = 2.0 * wide * parts
    return norms + (0.0 if most_every(design) is None else _STEPS_BYTES)


def most_every(design: Design) -> int | None:
    """The longest round that a run may take of itself; None where its rounds are the plan's, or nobody is met."""
    asked = design.job.synchronize
    kept = design.job.deterministic or design.plan.gradients.rounds.quorum > 0
    free = asked.kinds and not asked.every and not kept and design.plan.learners > 1
    return asked.most_every if free else None


def steps_between(plan: Plan, line: str) -> int:
    """Steps from one time that learners of `plan` send what is on `line|operation|axes` to the next; 1 of what is sent
    in every step."""
    every = plan.gradients.rounds.every if plan.learners > 1 else 1
    if line == TELLING:
        return min(every, TOLD_EVERY)
    return every if line.startswith(LineName.OUTER.value) else 1


def ranks_across(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks that hold in every learner what `rank` holds in its own, in the order of the learners."""
    members = [plan.ranks_of_learner(learner) for learner in range(plan.learners)]
    place = next(ranks.index(rank) for ranks in members if rank in ranks)
    return tuple(ranks[place] for ranks in members)


def fragment_elements(design: Design, *, rank: int) -> tuple[int, ...]:
    """Elements of trained parameters that `rank` has of every fragment: the model's blocks, dealt by their sizes."""
    plan, blocks = design.plan, design.model.blocks
    own = replace(design, plan=plan.of_learner())
    place = next(ranks.index(rank) for ranks in map(plan.ranks_of_learner, range(plan.learners)) if rank in ranks)
    held = holdings(own, contents=Contents.PARAMETERS)
    each = [0] * len(blocks)
    for index, block in enumerate(blocks):
        if index not in plan.frozen_blocks:
            names = (f"{PARAMETERS}{prefix(block, index)}{tensor.name}" for tensor in tensors(block))
            each[index] = sum(held[name].parts[place].elements for name in names if place in held[name].parts)
    parts = dealt([block.parameters for block in blocks], parts=plan.gradients.rounds.fragments)
    return tuple(sum(each[index] for index in part) for part in parts)


def _sent(elements: int, *, learners: int, precision: Precision) -> Iterator[tuple[str, float]]:
    """(operation, bytes) of the collectives of one fragment."""
    if not elements:
        return
    if precision not in PACKINGS:
        yield "all_reduce", float(elements * precision.bytes)
        return
    packed = float(learners * PACKINGS[precision].part_bytes(-(-elements // learners)))
    yield "all_to_all", packed
    yield "all_gather", packed
