"""Of plans that are as good the one that uses least: what a plan has that a simpler one does without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.cost.table import SHARDINGS
from meshwright.schedule.build import SPLIT
from meshwright.search.candidate import TIE
from meshwright.search.refine import Entry, entry_value
from meshwright.spec.job import Objective
from meshwright.spec.plan import Offload, Plan, Recompute
from meshwright.spec.synchronize import SyncKind
from meshwright.spec.units import format_percent

SAID = 3  # mechanisms that a line names at the most


def simplest_first(entries: Sequence[Entry], objective: Objective) -> list[Entry]:
    """`entries`, which come best first, with those as good as the first in the order of how little they use; the others
    behind them as they were.

    As good is what is within TIE of the first of what the objective minimises, so that which plans are is not a matter
    of the order in which they are compared. Of those on fewer devices, then with fewer `mechanisms`, then with fewer
    stages on a rank, fewer slices and shallower shards; of those that are alike in that the better one. Where cost is
    least only plans on as many devices are as good, whose time is the same too; where memory is, the faster of equals
    is first.
    """
    alike = [entry for entry in entries if _as_good(entry, entries[0], objective)]
    if objective is Objective.MEMORY or len(alike) < 2:
        return list(entries)
    kept = {id(entry) for entry in alike}
    return [*sorted(alike, key=_simplicity), *(entry for entry in entries if id(entry) not in kept)]


def mechanisms(plan: Plan) -> Mapping[str, str]:
    """What `plan` uses, each with its words: every axis of more than one rank, and whatever else has to work, be
    understood and be tuned besides the plain pass of every microbatch through every block."""
    schedule, groups = plan.schedule, plan.groups
    found = {axis.name.value: f"{axis.name.value} {axis.size}" for axis in plan.axes if axis.size > 1}
    found |= {f"odd {axis.name.value}": f"{axis.size} ranks, no power of two" for axis in plan.axes if _odd(axis.size)}
    has = {
        "microbatch": (_odd(plan.microbatch), f"microbatches of {plan.microbatch}, no power of two"),
        "experts": (plan.experts is not None, "a grid of experts of its own"),
        "meeting": (plan.gradients.word != SyncKind.EVERY_STEP.value, f"replicas that meet as {plan.gradients.word}"),
        "exchange": (1 < plan.exchange.inner < plan.context, "an exchange of context in two levels"),
        "chunks": (schedule.chunks > 1, f"{schedule.chunks} stages on a rank"),
        "halves": (schedule.kind in SPLIT, "backwards in halves"),
        "slices": (schedule.slices > 1, f"{schedule.slices} slices of a microbatch"),
        "table": (bool(schedule.table), "a schedule of its own"),
        "recompute": (any(group.recompute is not Recompute.NONE for group in groups), "recompute"),
        "offload": (any(group.offload is not Offload.NONE for group in groups), "offload"),
        "policies": (
            len({(group.sharding, group.recompute, group.offload, group.shards) for group in groups}) > 1,
            "blocks that are treated unlike",
        ),
        "order": (not plan.has_usual_order, "axes in another order than the usual one"),
        "placement": (plan.is_placed, "machines in another order"),
    }
    return found | {name: words for name, (used, words) in has.items() if used}


def why_simplest(entries: Sequence[Entry], objective: Objective) -> tuple[str, ...]:
    """What a plan that is better within TIE and ranked behind the first of `entries` saves, and what it uses more;
    nothing where the first is the best."""
    (chosen, _), value = entries[0], [entry_value(entry, objective) for entry in entries]
    least = min(range(len(entries)), key=value.__getitem__)
    if objective is Objective.MEMORY or not value[least] < value[0]:
        return ()
    other = entries[least][0].plan
    ours, theirs = mechanisms(chosen.plan), mechanisms(other)
    more = [words for name, words in theirs.items() if name not in ours]
    more = more or [f"{words}, not {ours[name]}" for name, words in theirs.items() if ours[name] != words]
    more = more or [f"{_deepest(other)}, not {_deepest(chosen.plan)}"]
    return (
        f"a plan that promises less by {format_percent(1.0 - value[least] / value[0], digits=2)} of what plans are "
        f"ranked by ({other.describe()}) is as good, within {format_percent(TIE, digits=2)}, and uses more: "
        f"{'; '.join(more[:SAID])}",
    )


def _as_good(entry: Entry, best: Entry, objective: Objective) -> bool:
    alike = objective is Objective.TIME or entry[0].plan.world_size == best[0].plan.world_size
    return alike and entry_value(entry, objective) <= (1.0 + TIE) * entry_value(best, objective) < float("inf")


def _simplicity(entry: Entry) -> tuple[int, ...]:
    plan = entry[0].plan
    deepest = max(SHARDINGS.index(group.sharding) for group in plan.groups)
    return plan.world_size, len(mechanisms(plan)), plan.schedule.chunks, plan.schedule.slices, deepest


def _deepest(plan: Plan) -> str:
    return max((group.sharding for group in plan.groups), key=SHARDINGS.index).value


def _odd(size: int) -> bool:
    return size & (size - 1) > 0
