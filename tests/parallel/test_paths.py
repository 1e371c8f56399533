"""Microbatches that leave out stages, or pass two the other way round, give what one device gives that applies the same
blocks to the same microbatches, in float64 to 1e-9; tests/run/test_drawn_traffic.py counts what they send."""

from __future__ import annotations

import pytest

from meshwright.schedule.paths import Paths
from meshwright.search import Scope
from meshwright.search import check as refusals
from meshwright.spec.plan import Design, Plan
from tests.parallel import parity_cases
from tests.parallel.parity_cases import Documents, Outcome
from tests.parallel.path_cases import CASES, OPTIMIZER, on
from tests.support.designs import Layout, with_speed
from tests.support.pool import Pool


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
