"""Every plan that the search can emit for a small model, and few of them that meet every pair of choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

from meshwright.search import enumerate_plans
from meshwright.spec.cluster import Precision
from meshwright.spec.job import Switch
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, Plan
from tests.support.designs import SEQUENCE, Layout, cluster, design


def even(blocks: int) -> Callable[[int, Sequence[int], int], Sequence[int]]:
    """Boundaries of stages that hold as many blocks as each other, as nearly as may be."""

    def bounds(_pipeline: int, ranks: Sequence[int], _devices: int) -> Sequence[int]:
        stages = len(ranks)
        return [round(index * blocks / stages) for index in range(stages + 1)]

    return bounds


def emitted(model: ModelSpec, *, ranks: int, batch: int = 16, compiled: Switch = Switch.OFF) -> list[Design]:
    """A design for each plan that the search lists on `ranks` processors in fp64."""
    machines = cluster(ranks)
    group = machines.groups[0]
    device = replace(group.device, peak_flops={Precision.FP64: 1e9})
    machines = replace(machines, groups=(replace(group, device=device),))
    job = replace(design(model, Layout(batch=batch)).job, compile=compiled)
    table = enumerate_plans(model, machines, job, boundaries=even(len(model.blocks)), trainable=True).table
    plans = [
        table.to_plan(row, model=model.name, cluster=machines.name, sequence_length=SEQUENCE)
        for row in range(len(table))
    ]
    return [Design(model=model, cluster=machines, job=job, plan=plan) for plan in plans]


def choices(plan: Plan) -> dict[str, object]:
    """What the search chose, by column."""
    group = plan.first_group
    return {
        "pipeline": plan.pipeline,
        "replicate": plan.replicate,
        "shard": plan.shard,
        "context": (plan.context, plan.exchange),
        "tensor": plan.tensor,
        "sharding": group.sharding,
        "sequence parallel": group.sequence_parallel,
        "recompute": group.recompute,
        "schedule": (plan.schedule.kind, plan.schedule.chunks),
        "microbatch": plan.microbatch,
        "microbatches": plan.schedule.microbatches,
    }


def pairs(plan: Plan) -> set[tuple[tuple[str, object], ...]]:
    """Every pair of choices that `plan` makes."""
    return set(combinations(choices(plan).items(), 2))


def covering(designs: Sequence[Design]) -> list[Design]:
    """Designs among these, few, such that every pair of choices that any of them makes is made by one."""
    left = set().union(*(pairs(entry.plan) for entry in designs))
    met = [(entry, pairs(entry.plan)) for entry in designs]
    found = []
    while left:
        entry, pairs_of_it = max(met, key=lambda item: len(item[1] & left))
        left -= pairs_of_it
        found.append(entry)
    return found
