"""Rules of degrees: what tensor, sequence and sharded parallelism divide must divide; batch and schedule must close."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.schedule import planned
from meshwright.schedule.build import CHUNKED, LOOPS, V_SHAPES
from meshwright.search.batch_advice import batch_fix
from meshwright.search.rules import Rule, Scope, choices, divisors, groups_of
from meshwright.search.tensor_degrees import TENSOR_RULES
from meshwright.search.used import used_of
from meshwright.spec.errors import Problem
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, Plan, ScheduleKind, Sharding


def tensor_is_axis(design: Design) -> Problem | None:
    """A group's tensor degree is the size of the tensor axis."""
    size = design.plan.tensor
    for where, group in groups_of(design.plan):
        if group.tensor != size:
            return Problem(
                where=f"{where}.tensor",
                what=f"{group.tensor} is not the size of the tensor axis, {size}",
                fix=f"choose {size}",
            )
    return None


def sequence_parallel_divides(design: Design) -> Problem | None:
    """Sequence parallelism has tensor ranks to divide the sequence over, and they divide it evenly."""
    plan = design.plan
    length = plan.sequence_length // plan.context
    for where, group in groups_of(plan):
        if not group.sequence_parallel:
            continue
        if group.tensor == 1:
            what = "sequence parallel has no tensor ranks to divide over"
            return Problem(where=f"{where}.sequence_parallel", what=what, fix="choose false, or tensor of 2 or more")
        if length % group.tensor:
            what = f"tensor {group.tensor} does not divide the sequence length {length:,}"
            what += f" of a context rank of {plan.context}" if plan.context > 1 else ""
            return Problem(where=f"{where}.sequence_parallel", what=what, fix="choose false")
    return None


def sharding_has_ranks(design: Design) -> Problem | None:
    """A sharded group has ranks to shard over, and a shard axis has something sharded on it.

    Beside groups over ranks of their own the axis has some too: with theirs nothing is said twice.
    """
    plan = design.plan
    shard, ranks = plan.shard, plan.shard * plan.context
    for where, group in groups_of(plan):
        sharded = group.sharding is not Sharding.NONE
        if sharded and ranks == 1:
            what = f"{group.sharding.value} has one rank to shard over"
            if plan.extents:
                what = f"groups over {_words(plan.extents)} ranks of their own beside a shard axis of 1"
            return Problem(where=f"{where}.sharding", what=what, fix=_ranks_fix(plan))
        if not sharded and shard > 1:
            what = f"nothing is sharded over the shard axis of {shard}"
            return Problem(where=f"{where}.sharding", what=what, fix="choose zero1, zero2 or zero3, or replicate")
    return None


def _ranks_fix(plan: Plan) -> str:
    """As many of the plan's replicas on the shard axis as the group over fewest ranks has."""
    fewest = next((shards for shards in plan.extents if shards > 1 and plan.data % shards == 0), None)
    if fewest is None:
        return "choose none, or a shard axis of 2 or more"
    axes = f"replicate {plan.data // fewest} and shard {fewest}"
    return f"choose {axes}: groups over {fewest} do not say so then, and those that do not now say shards = 1"


def _words(numbers: Sequence[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


def sharding_mixes(design: Design) -> Problem | None:
    """Groups that are sharded in unlike ways are all sharded, and a stage that holds a table and the head that is tied
    to it gathers both at once."""
    plan = design.plan
    found = list(groups_of(plan))
    whole = [where for where, group in found if group.sharding is Sharding.NONE]
    if whole and len(whole) < len(found):
        return Problem(
            where=f"{whole[0]}.sharding",
            what="none beside groups that are sharded",
            why="zero1 sends as much as none and holds less",
            fix="choose zero1, with shards = 1 to hold it whole, or none for all groups",
        )
    for index, stage in enumerate(plan.stages):
        table, head = stage.groups[0].sharding, stage.groups[-1].sharding
        both = stage.start == 0 and stage.stop == len(design.model.blocks) and design.model.head.tied
        if both and table is not head:
            return Problem(
                where=f"plan.stages[{index}].groups[{len(stage.groups) - 1}].sharding",
                what=f"{head.value} of a head that is tied to a table of {table.value}",
                fix=f"choose {table.value}, or {head.value} for the embedding's group too",
            )
    return None


def precision_known(design: Design) -> Problem | None:
    """The devices that the plan uses multiply in the precision that it asks for."""
    used = used_of(design.plan, design.cluster)
    for where, group in groups_of(design.plan):
        for device in (machines.device for machines in used.groups):
            if not device.peak_flops.get(group.precision):
                known = [precision.value for precision in device.peak_flops]
                what = f"{device.name} has no {group.precision.value} arithmetic"
                return Problem(where=f"{where}.precision", what=what, fix=choices(known))
    return None


def batch_is_asked(design: Design) -> Problem | None:
    """One step reads the batch that the job asks for, in sequences of its length."""
    plan, job = design.plan, design.job
    if plan.sequence_length != job.sequence_length:
        return Problem(
            where="plan.sequence_length",
            what=f"{plan.sequence_length:,} is not the job's {job.sequence_length:,}",
            fix=f"choose {job.sequence_length}",
        )
    if job.batch_tokens % job.sequence_length:
        whole = max(1, round(job.batch_tokens / job.sequence_length)) * job.sequence_length
        return Problem(
            where="job.batch_tokens",
            what=f"{job.batch_tokens:,} tokens are not whole sequences of {job.sequence_length:,}",
            fix=f"choose {whole}",
        )
    if plan.sequences != job.batch_sequences:
        microbatches = plan.schedule.microbatches
        without = f" without {plan.empty_rows:,} empty rows" if plan.empty_rows else ""
        what = (
            f"{plan.data} data ranks x {microbatches} microbatches of {plan.microbatch}{without} are "
            f"{plan.sequences:,} sequences, and the job's batch is {job.batch_sequences:,}"
        )
        return Problem(where="plan.microbatch", what=what, fix=batch_fix(design))
    return None


def empty_rows_are_last(design: Design) -> Problem | None:
    """Of the rows of a data rank one may be empty, and not of every one; each rank has a sequence."""
    plan = design.plan
    rows, most = plan.batch // plan.data, plan.data - 1
    if 0 <= plan.empty_rows <= (most if rows > 1 else 0):
        return None
    what = f"{plan.empty_rows:,} empty rows of {plan.data} data rank{'s' * (plan.data > 1)} with {rows:,} rows each"
    fix = f"choose 0 to {most}" if rows > 1 and most else "choose 0"
    return Problem(where="plan.empty_rows", what=what, fix=fix)


def sequence_fits_positions(design: Design) -> Problem | None:
    """Learned positions reach to the end of the sequence, and dense attention that stands for a sparse one does."""
    return beyond_positions(design.model, design.plan.sequence_length, where="plan.sequence_length")


def beyond_positions(model: ModelSpec, length: int, *, where: str) -> Problem | None:
    """Why `model` cannot read a sequence of `length` tokens; None when it can."""
    positions = model.embedding.positions
    if positions and length > positions:
        what = f"{length:,} is more than the {positions:,} positions the model has learned"
        return Problem(where=where, what=what, fix=f"choose {positions} or less")
    dense = model.dense_within
    if dense is None or length <= dense:
        return None
    what = f"attention that reads {dense:,} keys is dense up to so many positions, and sparse on {length:,}"
    return Problem(where=where, what=what, fix=f"choose {dense} or less")


def chunks_are_interleaved(design: Design) -> Problem | None:
    """Several stages on a rank belong to schedules that run several: loops and tables any number, V shapes two, on a
    pipeline.

    Breadth-first on one rank is layered accumulation.
    """
    plan, schedule = design.plan, design.plan.schedule
    kind, chunks = schedule.kind, schedule.chunks
    if chunks < 1 or (chunks > 1 and kind not in CHUNKED):
        what = f"{chunks} chunks under {kind.value}"
        return Problem(where="plan.schedule.chunks", what=what, fix="choose 1, or the interleaved schedule")
    if kind in V_SHAPES and chunks != 2:
        what = f"{kind.value} has {chunks} chunks and its ranks hold two stages"
        return Problem(where="plan.schedule.chunks", what=what, fix="choose 2, or 1f1b")
    alone = plan.pipeline == 1 and kind is not ScheduleKind.BREADTH_FIRST
    if kind in LOOPS | V_SHAPES and (chunks == 1 or alone):
        what = f"{kind.value} has {chunks} chunks on {plan.pipeline} pipeline ranks"
        plain = "gpipe" if kind is ScheduleKind.BREADTH_FIRST else "1f1b"
        fix = f"choose {plain}, or 2 chunks or more on 2 ranks or more"
        return Problem(where="plan.schedule.kind", what=what, fix=fix)
    return None


def table_is_legal(design: Design) -> Problem | None:
    """A schedule's table does every pass of every microbatch once, on the rank that holds the stage, after what it
    needs, and all ranks reach its end; other kinds have tables of their own.
    """
    plan, entry = design.plan, design.plan.schedule
    if entry.kind is ScheduleKind.TABLE and plan.pipeline == 1:
        return Problem(where="plan.schedule.kind", what="a table of one pipeline rank", fix="choose 1f1b")
    found = planned.table_problems(entry, pipeline=plan.pipeline)
    if not found:
        return None
    first, rest = found[0], len(found) - 1
    what = f"{first.what}, and {rest:,} more" if rest else first.what
    return replace(first, what=what, where=f"plan.{first.where}", fix=first.fix or "put before it what it waits for")


def least_microbatches(kind: ScheduleKind, *, pipeline: int, slices: int = 1) -> int:
    """How many microbatches fill a pipeline: one a rank, or slice of one, and two where they come up the ranks again.

    Schedules that wait for every forward before the first backward gain nothing from a full pipeline, and a table is
    made for as many as there are.
    """
    if kind in (ScheduleKind.GPIPE, ScheduleKind.BREADTH_FIRST, ScheduleKind.TABLE):
        return 1
    if kind in V_SHAPES:
        return 2 * pipeline - (kind is ScheduleKind.ZERO_BUBBLE_V)
    return -(-pipeline // max(slices, 1))


def microbatches_fill(design: Design) -> Problem | None:
    """Every pipeline rank has microbatches enough to work while others do: fewer run, and what they cost is told short
    before the path through a plan that is shown is followed.
    """
    plan, schedule = design.plan, design.plan.schedule
    least = least_microbatches(schedule.kind, pipeline=plan.pipeline, slices=schedule.slices)
    if schedule.microbatches >= least:
        return None
    fill = "does not fill" if schedule.microbatches == 1 else "do not fill"
    what = f"{_number(schedule.microbatches, 'microbatch')} {fill} a pipeline of {plan.pipeline}"
    what += f" under {schedule.kind.value}"
    return Problem(where="plan.schedule.microbatches", what=what, fix=_fill_fix(design, least=least))


def namesake(kind: ScheduleKind, *, pipeline: int, microbatches: int, slices: int = 1) -> ScheduleKind | None:
    """The schedule of another name under which every rank does the same passes in the same order, if there is one."""
    if kind is ScheduleKind.BREADTH_FIRST and pipeline == microbatches == 1:
        return ScheduleKind.ONE_F_ONE_B
    if kind is ScheduleKind.ZERO_BUBBLE_H2 and pipeline == microbatches == 2:
        return ScheduleKind.ZERO_BUBBLE_H1
    if kind is ScheduleKind.GPIPE and slices > 1 and microbatches == 1:
        return ScheduleKind.SEQUENCE_1F1B
    return None


def schedule_has_one_name(design: Design) -> Problem | None:
    """Of two names for the same passes in the same order the search knows one."""
    plan, schedule = design.plan, design.plan.schedule
    sizes = {"microbatches": schedule.microbatches, "slices": schedule.slices}
    other = namesake(schedule.kind, pipeline=plan.pipeline, **sizes)
    if other is None:
        return None
    what = f"{_number(schedule.microbatches, 'microbatch')} under {schedule.kind.value}"
    what += f" on {_number(plan.pipeline, 'pipeline rank')} is {other.value} by another name"
    return Problem(where="plan.schedule.kind", what=what, fix=f"choose {other.value}, or more microbatches")


def microbatches_pair(design: Design) -> Problem | None:
    """DualPipeV has a microbatch that goes down the ranks and one that comes up for each of them."""
    plan, schedule = design.plan, design.plan.schedule
    least = least_microbatches(schedule.kind, pipeline=plan.pipeline)
    if schedule.kind is not ScheduleKind.DUAL_PIPE_V or schedule.microbatches >= least:
        return None
    what = f"{schedule.microbatches} microbatches are not two for each of {plan.pipeline} ranks"
    what += f" under {schedule.kind.value}"
    return Problem(where="plan.schedule.microbatches", what=what, fix=_fill_fix(design, least=least))


def microbatches_round(design: Design) -> Problem | None:
    """The interleaved schedule deals microbatches in rounds of the pipeline size."""
    plan, schedule = design.plan, design.plan.schedule
    if schedule.kind is not ScheduleKind.INTERLEAVED or schedule.microbatches % plan.pipeline == 0:
        return None
    what = f"{schedule.microbatches} microbatches are not whole rounds of pipeline {plan.pipeline} under interleaved"
    return Problem(where="plan.schedule.microbatches", what=what, fix=_fill_fix(design, least=plan.pipeline))


def _fill_fix(design: Design, *, least: int) -> str:
    """Microbatches, `least` or more, that the batch can be cut into under the schedule, and what they are; else what
    else would do. Another schedule is named where it keeps the plan's stages and slices.
    """
    plan, schedule = design.plan, design.plan.schedule
    local, rounds = design.job.batch_sequences // plan.data, schedule.kind is ScheduleKind.INTERLEAVED
    counts = [n for n in divisors(max(local, 1)) if n >= least and not (rounds and n % plan.pipeline)]
    others = ["breadth-first"] if rounds else ["gpipe"] if schedule.chunks == schedule.slices == 1 else []
    if counts:
        cut = f"{counts[0]} microbatches of {_number(local // counts[0], 'sequence')}"
        return f"choose {', or '.join([cut, *others])}"
    why = f"the {_number(local, 'sequence')} of a data rank cannot be cut so"
    return f"choose {', or '.join([*others, 'a smaller pipeline, or a larger batch'])}: {why}"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


DEGREE_RULES = (
    Rule(name="tensor-is-axis", scope=Scope.PLAN, check=tensor_is_axis),
    *TENSOR_RULES,
    Rule(name="sequence-parallel-divides", scope=Scope.PLAN, check=sequence_parallel_divides),
    Rule(name="sharding-has-ranks", scope=Scope.PLAN, check=sharding_has_ranks),
    Rule(name="sharding-mixes", scope=Scope.PLAN, check=sharding_mixes),
    Rule(name="precision-known", scope=Scope.PLAN, check=precision_known),
    Rule(name="empty-rows-are-last", scope=Scope.PLAN, check=empty_rows_are_last),
    Rule(name="batch-is-asked", scope=Scope.PLAN, check=batch_is_asked),
    Rule(name="sequence-fits-positions", scope=Scope.PLAN, check=sequence_fits_positions),
    Rule(name="chunks-are-interleaved", scope=Scope.PLAN, check=chunks_are_interleaved),
    Rule(name="table-is-legal", scope=Scope.PLAN, check=table_is_legal),
    Rule(name="microbatches-fill", scope=Scope.SEARCH, check=microbatches_fill),
    Rule(name="microbatches-pair", scope=Scope.PLAN, check=microbatches_pair),
    Rule(name="microbatches-round", scope=Scope.PLAN, check=microbatches_round),
    Rule(name="schedule-has-one-name", scope=Scope.SEARCH, check=schedule_has_one_name),
)
