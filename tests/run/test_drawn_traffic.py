"""The bytes of every collective of every plan that the parity machine draws are predicted exactly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from meshwright import cost
from meshwright.run.children import in_child
from tests.parallel import draws
from tests.parallel.draws import Draw
from tests.parallel.test_drawn_plans import ALL, FIXED
from tests.run import dry_cases

RUNS = 20
FEW = FIXED[:8]
REST = [ALL[start : start + RUNS] for start in range(0, len(ALL), RUNS)]


def check(chosen: Sequence[Draw]) -> None:
    """Lines, operations, axes and bytes of one pipeline rank of each draw: another one from draw to draw."""
    designs = [draws.build(draw) for draw in chosen]
    ranks = [place % entry.plan.pipeline for place, entry in enumerate(designs)]
    found = in_child(dry_cases.count_ranks, {"designs": designs, "ranks": ranks}, seconds=280)
    for draw, entry, rank, counted in zip(chosen, designs, ranks, found, strict=True):
        assert dict(cost.traffic(entry, rank=rank).bytes) == dict(counted.bytes), (str(draw), rank)


def test_every_byte_of_a_few_drawn_plans_is_predicted() -> None:
    check(FEW)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(REST)))
def test_every_byte_of_every_drawn_plan_is_predicted(place: int) -> None:
    check(REST[place])
