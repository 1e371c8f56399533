"""Ranks of matrices that ranks share: stable ranks are those of singular values, and factors the nearest ones."""

from __future__ import annotations

import pytest
import torch

from meshwright.parallel.refactor import rebalanced
from meshwright.spec.plan import Sharding
from tests.parallel.low_rank_cases import MATRICES, RANKS, factored, found_ranks
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool

LAYOUTS = (
    Layout(tensor=2, shard=2, sharding=Sharding.PARAMETERS, sequence_parallel=True, batch=8),
    Layout(pipeline=2, replicate=2, batch=8),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stable_ranks_are_those_of_singular_values(pool: Pool, layout: Layout) -> None:
    told = pool.run(found_ranks, design(models.model(), layout), ranks=4)
    first, second, exact = told[0]
    assert set(exact) == set(MATRICES)
    for name, value in exact.items():
        assert first[name] == pytest.approx(value, rel=1e-3), name
        assert second[name] == pytest.approx(value, rel=1e-3), name
    assert all(entry[:2] == told[0][:2] for entry in told)


@pytest.mark.parametrize("layout", [pytest.param(LAYOUTS[0], marks=pytest.mark.slow), LAYOUTS[1]], ids=str)
def test_the_switch_keeps_all_but_matrices_which_become_their_nearest(pool: Pool, layout: Layout) -> None:
    found = pool.run(factored, design(models.model(), layout), ranks=4)[0]
    before, switched, trained, balanced = (found[name] for name in ("before", "switched", "trained", "balanced"))
    halves = {f"layers.1.{each.name}.{half}.weight" for each in RANKS[2] for half in ("up", "down")}
    fresh = {name for name in switched if any(half in name for half in halves)}
    assert fresh
    for name, x in switched.items():
        if name not in fresh:
            assert torch.equal(x, before[name]), name
    for name in fresh:
        if name.startswith("optimizer."):
            assert not switched[name].any()
            assert not balanced[name].any()
            assert trained[name].any()
    for each in RANKS[2]:
        key = f"model.layers.1.{each.name}"
        u, s, vh = torch.linalg.svd(before[f"{key}.weight"], full_matrices=False)
        nearest = u[:, : each.rank] * s[: each.rank] @ vh[: each.rank]
        torch.testing.assert_close(_product(switched, key), nearest, rtol=0, atol=1e-12)
        torch.testing.assert_close(_product(balanced, key), _product(trained, key), rtol=0, atol=1e-12)
        up, down = balanced[f"{key}.up.weight"], balanced[f"{key}.down.weight"]
        torch.testing.assert_close(up.T @ up, down @ down.T, rtol=0, atol=1e-12)
    kept = {name: x for name, x in trained.items() if name not in fresh}
    assert all(torch.equal(x, balanced[name]) for name, x in kept.items())


def test_factors_are_balanced_without_their_product() -> None:
    up, down = torch.randn(40, 6, dtype=torch.float64) * 100.0, torch.randn(6, 30, dtype=torch.float64)
    left, right = rebalanced(up, down)
    torch.testing.assert_close(left @ right, up @ down)
    torch.testing.assert_close(left.T @ left, right @ right.T)


def _product(state: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    return state[f"{key}.up.weight"] @ state[f"{key}.down.weight"]
