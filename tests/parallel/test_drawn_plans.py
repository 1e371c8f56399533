"""The parity machine: plans drawn over all dimensions at once give what one device gives."""

from __future__ import annotations

import pytest

from meshwright.search.runtime_rules import EIGHT_BIT_GRADIENTS, GRADIENT_PRECISIONS
from meshwright.spec.cluster import Precision
from meshwright.spec.optimizer import Moments
from meshwright.spec.plan import Offload, Sharding
from tests.parallel import adding, drawing, drawn, draws, fixing, reproduce
from tests.parallel.cover import values
from tests.parallel.drawn import FIXED
from tests.parallel.draws import Draw
from tests.support import models
from tests.support.designs import SEQUENCE
from tests.support.pool import Pool
from tests.support.sampled import sampled

SMALL = [draw for draw in FIXED if 1 < draw.ranks <= 4]
# Routers choose otherwise where scores are rounded.
NARROW = [adding.narrow(draw) for draw in SMALL if not draw.has_mixtures][::2]
ROUNDED = [one for one in map(adding.rounded, SMALL) if (one.precision, one.gradients) != ("fp64", "whole")]
ROUNDED.sort(key=lambda draw: draw.has_mixtures)

YES_AND_NO = ("tied", "positions", "empty_rows", "placement", "extents", "prefix", "factored")
# What the fixed plans and those near them have to meet of each dimension.
VALUES: dict[str, set[object]] = {
    "ranks": set(drawing.RANKS),
    "steps": {1, 2},
    "groups": set(draws.GROUPS),
    "optimizer": {*draws.OPTIMIZERS, draws.ADAFACTOR, draws.PLAIN_SGD},
    "moments": set(Moments),
    "kinds": set(models.LAYERS),
    "offload": {*Offload, "unlike"},
    "offloads": {Offload.NONE, Offload.OPTIMIZER, Offload.ACTIVATIONS},
    "sharding": {*Sharding, "unlike"},
    "gradients": {"whole", *GRADIENT_PRECISIONS} - {Precision.FP32},
    "length": {SEQUENCE, 12, 13, 24},
    **{name: {False, True} for name in YES_AND_NO},
}


@pytest.mark.parametrize("name", VALUES)
def test_every_value_of_a_dimension_is_drawn(name: str) -> None:
    assert values([*FIXED, *NARROW, *ROUNDED])[name] >= VALUES[name]


def test_no_rule_refuses_a_fixed_plan() -> None:
    assert len(FIXED) == fixing.FIXED_COUNT, fixing.ANEW
    assert [draw for draw in FIXED if draws.refused(draw)] == [], fixing.ANEW


def test_gradients_of_mixtures_are_drawn_in_eight_bits() -> None:
    assert {draw.gradients for draw in ROUNDED if draw.has_mixtures} == set(EIGHT_BIT_GRADIENTS)


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
@pytest.mark.parametrize("place", range(fixing.COUNT - fixing.FIXED_COUNT))
def test_every_other_drawn_plan_gives_it_too(pool: Pool, place: int) -> None:
    reproduce.check(pool, drawn.rest()[place])


@pytest.mark.slow
def test_the_fixed_plans_are_those_of_all_that_meet_the_most_choices() -> None:
    assert fixing.fixed() == FIXED, fixing.ANEW
