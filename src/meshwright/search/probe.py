"""Plans with settings that the search did not emit, built as near to the chosen one as can be, to ask the rules why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from meshwright.cost import Layout, PlanTable
from meshwright.cost.meeting import meetings_of
from meshwright.cost.table import column_names
from meshwright.schedule.build import LOOPS, V_SHAPES
from meshwright.search.check import ANSWERS, check
from meshwright.search.constraints import WORDS, Value
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design, ScheduleKind, Sharding

_COLUMN_OF = {"zero": "sharding"}
_DERIVED = ("devices", "data")
_SIMPLER = ("tensor", "pipeline", "context", "microbatch")


def broken_rules(settings: Mapping[str, Value], near: Design) -> tuple[Problem, ...]:
    """What the rules say of the plan with `settings` that breaks fewest of them; () where one breaks none.

    Of plans that break as many the one that differs least from the plan of `near`. Its job is the one asked.
    """
    found = [check(made, scopes=ANSWERS) for made in _probes(settings, near)]
    return min(found, key=len, default=())


def _probes(settings: Mapping[str, Value], near: Design) -> Iterator[Design]:
    """Designs with `settings`, first those nearest to `near`: what is not named stays, or is left at 1."""
    own = PlanTable.from_plan(near.plan)
    start = {name: int(getattr(own, name)[0]) for name in column_names() if name not in ("layout", "order")}
    start["sync"] = WORDS["sync"].index(near.plan.gradients.word)
    asked = {
        _COLUMN_OF.get(column, column): WORDS[column].index(str(value)) if column in WORDS else int(value)
        for column, value in settings.items()
        if column not in _DERIVED
    }
    free = [name for name in _SIMPLER if name not in asked and start[name] > 1]
    for simple in product((False, True), repeat=len(free)):
        ones = {name: 1 for name, yes in zip(free, simple, strict=True) if yes}
        yield _design(_closed({**start, **ones, **asked}, asked, settings, near), near)


def _closed(
    row: dict[str, int], asked: Mapping[str, int], settings: Mapping[str, Value], near: Design
) -> dict[str, int]:
    """The row with what follows from its degrees: data ranks, sharding, schedule, grid of experts, microbatches."""
    inner = row["tensor"] * row["pipeline"] * row["context"]
    devices = int(settings.get("devices", near.cluster.num_devices))
    data = int(settings.get("data", max(1, devices // inner)))
    unsharded = WORDS["zero"].index(Sharding.NONE.value)
    if "shard" in asked and "replicate" not in asked:
        row["replicate"] = max(1, data // row["shard"])
    elif "replicate" in asked and "shard" not in asked:
        row["shard"] = max(1, data // row["replicate"])
    elif "shard" not in asked:
        whole = row["sharding"] != unsharded
        row["shard"], row["replicate"] = (data, 1) if whole else (1, data)
    if "sharding" not in asked:
        known = row["sharding"] if row["sharding"] != unsharded else WORDS["zero"].index(Sharding.OPTIMIZER.value)
        row["sharding"] = known if row["shard"] > 1 else unsharded
    schedules = WORDS["schedule"]
    if "schedule" not in asked:
        kind = ScheduleKind.INTERLEAVED if row["chunks"] > 1 and "chunks" in asked else ScheduleKind.ONE_F_ONE_B
        row["schedule"] = schedules.index(kind.value)
    if "slices" not in asked and schedules[row["schedule"]] != ScheduleKind.SEQUENCE_1F1B.value:
        row["slices"] = 1
    if "chunks" not in asked:
        row["chunks"] = 2 if ScheduleKind(schedules[row["schedule"]]) in LOOPS | V_SHAPES else 1
    if "sequence_parallel" not in asked and row["tensor"] == 1:
        row["sequence_parallel"] = 0
    if "expert" in asked or "expert_tensor" in asked:
        grid = asked.get("expert", 1) > 1 or "expert_tensor" in asked
        row["expert"] = asked.get("expert", 1) if grid else 0
        row["expert_tensor"] = asked.get("expert_tensor", 1) if grid else 0
    local = near.job.batch_sequences // max(1, row["shard"] * row["replicate"])
    row["microbatches"] = max(1, local // row["microbatch"])
    return row


def _design(row: Mapping[str, int], near: Design) -> Design:
    blocks, ranks, stages = len(near.model.blocks), row["pipeline"], row["pipeline"] * row["chunks"]
    turns = row["chunks"] == 2 and ScheduleKind(WORDS["schedule"][row["schedule"]]) in V_SHAPES
    forth = list(range(ranks))
    layout = Layout(
        bounds=tuple(blocks * index // stages for index in range(stages + 1)),
        ranks=tuple([*forth, *reversed(forth)] if turns else forth * row["chunks"]),
    )
    table = PlanTable.build(dict(row), layouts=(layout,), syncs=meetings_of(near.job))
    length = near.job.sequence_length
    plan = table.to_plan(0, model=near.model.name, cluster=near.cluster.name, sequence_length=length)
    return replace(near, plan=plan)
