"""What users do beside a plain forward gives under every plan what it gives on one device."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.spec.degrees import plan_of_degrees
from tests.parallel import foreign_uses
from tests.support.pool import Pool

PENALISED: tuple[dict[str, Any], ...] = (
    {"tensor": 2},
    {"replicate": 2},
    {"shard": 2, "sharding": "zero1"},
    {"shard": 2, "sharding": "zero3"},
    {"shard": 2, "replicate": 2},
    {"tensor": 2, "shard": 2},
)


@pytest.mark.parametrize("degrees", PENALISED, ids=str)
@pytest.mark.parametrize("by_loss", [True, False], ids=["in the loss", "of the gradients"])
def test_a_penalty_on_parameters_is_that_of_one_device(pool: Pool, degrees: dict[str, Any], by_loss: bool) -> None:
    ranks = plan_of_degrees(**degrees).world_size
    for apart in pool.run(foreign_uses.decayed, degrees, by_loss, ranks=ranks):
        assert max(apart.values()) < 1e-12, apart
