"""Parameters that somebody else holds, and hooks on them: kept where they can be, and never passed over in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.parallel.foreign import parallelize
from meshwright.spec.degrees import plan_of_degrees
from meshwright.spec.errors import ConfigError
from tests.parallel import held_cases
from tests.support.pool import Pool


def _tripled(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def test_hooks_on_parameters_stay_on_one_device() -> None:
    module = nn.Linear(4, 4).double()
    module.weight.register_hook(lambda gradient: gradient * 10)
    module.bias.register_post_accumulate_grad_hook(_tripled)
    module(held_cases.rows()).square().mean().backward()
    expected = [x.grad.clone() for x in module.parameters() if x.grad is not None]
    laid = parallelize(module, plan_of_degrees(precision="fp64"))
    laid.backward(laid.module(held_cases.rows()).square().mean())
    assert [torch.equal(x.grad, y) for x, y in zip(module.parameters(), expected, strict=True)] == [True, True]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("degrees", [{"replicate": 2}, {"tensor": 2}, {"shard": 2}], ids=str)
def test_hooks_on_parameters_are_refused_over_ranks(register: str, degrees: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    weight = module[2].weight
    getattr(weight, register)(lambda _: None)
    with pytest.raises(ConfigError, match=r"^2.weight: has a hook.*module-hooks-stay\); remove it"):
        parallelize(module, plan_of_degrees(precision="fp32", **degrees), example=(torch.zeros(1, 4),))
    assert module[2].weight is weight


def test_a_parameter_that_a_tuple_holds_too_trains_over_replicas(pool: Pool) -> None:
    assert max(pool.run(held_cases.tied_apart, ranks=2)) < 1e-12


def test_a_forward_that_reads_what_was_replaced_is_told_which_parameter_it_was(pool: Pool) -> None:
    for said in pool.run(held_cases.tied_told, ranks=2):
        assert said.startswith("one.weight: t of what this parameter was before the module was laid")
        assert "optimizers of laid.module.parameters()" in said


@pytest.mark.parametrize("degrees", [{"shard": 2}, {"tensor": 2}], ids=str)
def test_an_optimizer_made_before_is_told_so(pool: Pool, degrees: dict[str, Any]) -> None:
    for shape, said in pool.run(held_cases.held_before, degrees, ranks=2):
        assert shape == (8, 4)
        assert said.startswith("0.weight: grad of what this parameter was before the module was laid")
