"""Learners become low rank as one: from the factors of their mean, whatever their way of meeting has on its way."""

from __future__ import annotations

import numpy
import pytest

from meshwright.spec.plan import Sharding
from meshwright.spec.synchronize import SyncKind
from tests.parallel import learner_rank_cases as cases
from tests.parallel.parity_cases import TOLERANCE
from tests.parallel.test_outer import LAYOUTS, ROUNDS, met
from tests.support.designs import Layout
from tests.support.pool import Pool

SHARDED = Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS, batch=8)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((LAYOUTS["replicas"], kind) for kind in (SyncKind.DILOCO, SyncKind.EAGER)),
        *(
            pytest.param(LAYOUTS["replicas"], kind, marks=pytest.mark.slow)
            for kind in (SyncKind.LOCAL, SyncKind.CO2, SyncKind.STREAMING)
        ),
        (SHARDED, SyncKind.STREAMING),
        pytest.param(LAYOUTS["pipeline"], SyncKind.EAGER, marks=pytest.mark.slow),
        pytest.param(LAYOUTS["tensor"], SyncKind.DILOCO, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_learners_go_on_from_the_factors_of_their_mean(pool: Pool, layout: Layout, kind: SyncKind) -> None:
    """At the end of a round, while something travels; and again, when factors are balanced anew."""
    entry, every = met(layout, kind), ROUNDS[kind].every
    at, again, steps = every, 3 * every, 4 * every + 1
    wanted = cases.reference(entry, at, again, steps)
    for learner, own in pool.run(cases.switched, entry, at, again, steps, ranks=layout.ranks):
        assert own
        for name, value in own.items():
            numpy.testing.assert_allclose(value, wanted[learner][name], rtol=0, atol=TOLERANCE, err_msg=name)


def test_learners_with_other_factors_are_named(pool: Pool) -> None:
    entry = met(LAYOUTS["replicas"], SyncKind.DILOCO)
    for told in pool.run(cases.spoilt, entry, ranks=2):
        assert "learners went from unlike parameters when step 0 was done" in told
        assert "they made unlike factors" in told
