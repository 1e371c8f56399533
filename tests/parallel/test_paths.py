"""Microbatches that leave out stages, or pass two the other way round, give what one device gives that applies the same
blocks to the same microbatches, in float64 to 1e-9."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.run.children import in_child
from meshwright.schedule import planned
from meshwright.schedule.paths import Paths
from meshwright.schedule.skip import Line, along
from meshwright.search import Scope
from meshwright.search import check as refusals
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Design, Plan, Recompute, Sharding
from meshwright.spec.skip import SkipSpec, Swap
from tests.parallel import parity_cases
from tests.parallel.parity_cases import Documents, Outcome
from tests.run import dry_cases
from tests.support import models
from tests.support.designs import Layout, design, with_speed
from tests.support.pool import Pool

EVEN: Paths = ((0, 1, 3), (0, 2, 3)) * 2
TURNED: Paths = ((0, 2, 1, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3))
OPTIMIZER = OptimizerSpec(learning_rate=1e-2, clip_norm=0.5)
LINE = Line(forward=(1.0, 2.0, 1.0, 1.0), backward=(2.0, 4.0, 2.0, 2.0), transfer=(0.1, 0.3, 0.1, 0.0))
CASES = (
    ("tiny", Layout(pipeline=4, batch=4), EVEN),
    ("gpt", Layout(pipeline=4, batch=8, microbatch=2, recompute=Recompute.FULL), TURNED),
    ("tiny", Layout(pipeline=4, replicate=2, batch=8), TURNED),
    ("tied", Layout(pipeline=4, shard=2, sharding=Sharding.PARAMETERS, batch=8), EVEN),
    ("mixture_full", Layout(pipeline=4, shard=2, sharding=Sharding.OPTIMIZER, batch=8), TURNED),
    ("tiny", Layout(pipeline=4, tensor=2, sequence_parallel=True, batch=4), EVEN),
)


def on(kind: str, layout: Layout, paths: Paths) -> Design:
    made = design(models.all_models()[kind], layout, z_loss=1e-3, optimizer=OPTIMIZER)
    found = along(LINE, paths)
    assert found is not None
    skip = SkipSpec(share=0.5, swap=Swap.NEIGHBOURS)
    plan = replace(made.plan, schedule=planned.of(found.program, chunks=1))
    return replace(made, job=replace(made.job, skip=skip), plan=plan)


@pytest.mark.parametrize(("kind", "layout", "paths"), CASES, ids=str)
def test_paths_give_what_one_device_gives(pool: Pool, kind: str, layout: Layout, paths: Paths) -> None:
    """Losses, gradients, their norm and the step; evaluation is of the whole model."""
    entry = on(kind, layout, paths)
    assert refusals(with_speed(entry), scopes=frozenset({Scope.PLAN, Scope.RUNTIME})) == ()
    expected = reference(entry, entry.plan)
    found = pool.run(parity_cases.one_rank, entry, Documents.TWO, ranks=entry.plan.world_size)
    parity_cases.compare(expected, found)
    assert abs(expected.loss - reference(entry, None).loss) > 1e-6


def reference(entry: Design, along: Plan | None) -> Outcome:
    return parity_cases.one_device(
        entry.model,
        count=entry.plan.batch,
        length=entry.plan.sequence_length,
        z_loss=entry.job.z_loss,
        optimizer=OPTIMIZER,
        packed=Documents.TWO,
        along=along,
    )


def test_every_byte_of_paths_is_predicted() -> None:
    """Of the first stage and of one that half of the microbatches leave out."""
    designs = [on(*CASES[place]) for place in (0, 3, 3, 5)]
    ranks = [0, 1, 3, 2]
    found = in_child(dry_cases.count_ranks, {"designs": designs, "ranks": ranks}, seconds=280)
    for entry, rank, counted in zip(designs, ranks, found, strict=True):
        assert dict(cost.traffic(entry, rank=rank).bytes) == pytest.approx(dict(counted.bytes), rel=1e-12), rank
