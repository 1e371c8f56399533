"""Copies in memory: a run goes on from them without a rank, on other layouts, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.spec.plan import Sharding
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool
from tests.train.copies_cases import recovered

ZERO3 = Sharding.PARAMETERS
SHARDS = Layout(shard=4, sharding=ZERO3, batch=12)
REPLICAS = Layout(replicate=4, batch=12)
STAGES = Layout(pipeline=2, replicate=2, batch=12)
SLICES = Layout(tensor=2, shard=2, sharding=ZERO3, batch=12)
THREE = Layout(shard=3, sharding=ZERO3, batch=12)
THREE_STAGES = Layout(pipeline=3, batch=12)
THREE_REPLICAS = Layout(replicate=3, batch=12)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Workers of its own: after a mesh on some of them they are in unlike numbers of groups."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.mark.parametrize(
    ("first", "second", "lost", "cut_short"),
    [
        (SHARDS, THREE, 0, True),
        (SHARDS, THREE_STAGES, 3, False),
        pytest.param(REPLICAS, THREE_REPLICAS, 1, True, marks=pytest.mark.slow),
        pytest.param(STAGES, THREE, 2, False, marks=pytest.mark.slow),
        pytest.param(SLICES, THREE_REPLICAS, 2, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_left_is_what_was_copied(first: Layout, second: Layout, lost: int, cut_short: bool, pool: Pool) -> None:
    model = models.model()
    found = pool.run(recovered, design(model, first), design(model, second), lost, cut_short, ranks=4)
    assert [unlike for unlike, _, _ in found] == [[]] * 4
    assert {step for _, _, step in found} == {2}
    losses = [loss for rank, (_, loss, _) in enumerate(found) if rank != lost]
    assert max(losses) - min(losses) < 1e-9 * abs(losses[0])
    assert losses[0] > 0.0
