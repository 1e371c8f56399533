"""The parity machine: plans drawn over all dimensions at once give what one device gives."""

from __future__ import annotations

import pytest

from tests.parallel import draws, reproduce
from tests.parallel.draws import Draw
from tests.support.pool import Pool

ALL = draws.legal(400, seed=4)
FIXED = draws.covering(ALL, count=80)
REST = [draw for draw in ALL if draw not in FIXED]


@pytest.mark.parametrize("draw", sorted(FIXED, key=lambda draw: draw.ranks), ids=str)
def test_a_drawn_plan_gives_what_one_device_gives(pool: Pool, draw: Draw) -> None:
    reproduce.check(pool, draw)


@pytest.mark.slow
@pytest.mark.parametrize("draw", REST, ids=str)
def test_every_other_drawn_plan_gives_it_too(pool: Pool, draw: Draw) -> None:
    reproduce.check(pool, draw)
