"""What users do beside a plain forward gives under every plan what it gives on one device."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.spec.degrees import plan_of_degrees
from tests.parallel import foreign_uses
from tests.parallel.user_models import DIVIDED, USERS
from tests.support.pool import Pool

TOLERANCE = 1e-12
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
        assert max(apart.values()) < TOLERANCE, apart


@pytest.mark.parametrize("kind", USERS)
def test_what_users_write_beside_layers_is_divided_and_exact(pool: Pool, kind: str) -> None:
    for apart, divided in pool.run(foreign_uses.stepped, kind, {"tensor": 2}, ranks=2):
        assert max(apart.values()) < TOLERANCE, apart
        assert {name for name in divided if "bias" not in name} == DIVIDED[kind]
