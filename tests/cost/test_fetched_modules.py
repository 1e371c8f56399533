"""Hooks that fetch the parameters of module after module take the host's time, which small work does not hide."""

from dataclasses import replace

import pytest

from meshwright.cost import SHARDINGS, PlanTable
from meshwright.cost.host_time import host_extra
from meshwright.cost.stacks import SOFTWARE
from meshwright.spec.plan import Sharding
from tests.cost.cost_examples import A100, llama, mixed

DEEPSPEED = SOFTWARE["deepspeed"]


def extra(layer, *, sharding=Sharding.PARAMETERS, software=DEEPSPEED):
    table = PlanTable.build({"shard": 8, "sharding": SHARDINGS.index(sharding)}, layouts=[])
    return float(host_extra(layer, table, device=A100, software=software)[0])


def test_every_module_with_parameters_is_fetched():
    """Four projections and three, and two norms; biases are of the modules of their matrices."""
    layer = llama().layers[0]
    assert extra(layer) == pytest.approx(9 * DEEPSPEED.fetch_seconds)
    biased = replace(layer, mixer=replace(layer.mixer, qkv_bias=True, output_bias=True))
    assert extra(biased) == extra(layer)


def test_experts_are_fetched_one_by_one():
    layer = mixed().layers[1]
    fewer = replace(layer, transform=replace(layer.transform, experts=layer.transform.experts // 2))
    each = 3 if layer.transform.gated else 2
    assert extra(layer) - extra(fewer) == pytest.approx(each * layer.transform.experts // 2 * DEEPSPEED.fetch_seconds)


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.OPTIMIZER, Sharding.GRADIENTS])
def test_what_stays_whole_is_not_fetched(sharding):
    assert extra(llama().layers[0], sharding=sharding) == 0.0
    assert extra(llama().layers[0], software=SOFTWARE["torch"]) == 0.0
