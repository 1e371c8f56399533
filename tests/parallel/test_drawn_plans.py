"""The parity machine: plans drawn over all dimensions at once give what one device gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel import drawing, draws, reproduce
from tests.parallel.cover import covering
from tests.parallel.draws import Draw
from tests.support.pool import Pool
from tests.support.sampled import sampled

ALL = drawing.legal(400, seed=4)
FIXED = covering(ALL, count=80)
# Routers choose otherwise where scores are rounded.
DENSE = [draw for draw in FIXED if draw.model not in draws.MIXTURES and 1 < draw.ranks <= 4]
NARROW = [replace(draw, precision="bf16" if place % 3 else "fp32") for place, draw in enumerate(DENSE[::2])]
ROUNDED = [one for one in map(drawing.rounded, DENSE) if one not in DENSE]
REST = [draw for draw in ALL if draw not in FIXED]


@pytest.mark.parametrize("draw", sorted(FIXED, key=lambda draw: (draw.ranks, draw.axes)), ids=str)
def test_a_drawn_plan_gives_what_one_device_gives(pool: Pool, draw: Draw) -> None:
    reproduce.check(pool, draw)


@pytest.mark.parametrize("draw", sampled(NARROW, quick=7), ids=str)
def test_a_drawn_plan_is_near_one_device_in_the_precisions_that_train(pool: Pool, draw: Draw) -> None:
    """What fp64 does not show: gradients and activations of two types side by side."""
    reproduce.check(pool, draw)


@pytest.mark.parametrize("draw", sampled(ROUNDED, quick=3), ids=str)
def test_a_drawn_plan_whose_gradients_or_products_are_rounded_is_near_one_device(pool: Pool, draw: Draw) -> None:
    reproduce.check(pool, draw)


@pytest.mark.slow
@pytest.mark.parametrize("draw", REST, ids=str)
def test_every_other_drawn_plan_gives_it_too(pool: Pool, draw: Draw) -> None:
    reproduce.check(pool, draw)
