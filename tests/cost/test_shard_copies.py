"""What sharding copies on the device itself."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from meshwright.cost import SHARDINGS, PlanTable, evaluate
from meshwright.cost.shard_copies import ShardCopies, copy_seconds
from meshwright.cost.stacks import SOFTWARE
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.plan import Sharding
from meshwright.spec.report import LineName
from tests.cost.cost_examples import A100, JOB, even_layout, llama, selene

RATE = A100.memory_bandwidth * A100.memory_fraction


def each(how, *, compute=2.0, reduced=4.0, device=A100):
    found = copy_seconds(how, compute=np.array([compute]), reduced=np.array([reduced]), device=device)
    return float(found.gathered[0]) * RATE, float(found.scattered[0]) * RATE


def test_bytes_are_those_that_each_stack_reads_and_writes():
    assert each(ShardCopies.NONE) == (0.0, 0.0)
    assert each(ShardCopies.UNITS) == pytest.approx((2.0 + 2.0, 2.0 + 4.0))
    joined, cast, divided = 2.0 + 2.0, 2.0 + 4.0, 4.0 + 4.0
    assert each(ShardCopies.FLAT) == pytest.approx((0.0, joined + cast + divided))
    # Nothing is cast that travels as it was made.
    assert each(ShardCopies.FLAT, reduced=2.0) == pytest.approx((0.0, joined + 2.0 + 2.0))


def test_processors_have_none_apart_from_what_is_measured_of_their_layers():
    assert each(ShardCopies.UNITS, device=replace(A100, kind=DeviceKind.CPU)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("sharding", "gathers", "scatters"),
    [(Sharding.OPTIMIZER, 1, 1), (Sharding.GRADIENTS, 1, 4), (Sharding.PARAMETERS, 8, 4)],
)
def test_a_step_copies_as_often_as_it_gathers_and_scatters(sharding, gathers, scatters, monkeypatch):
    model = llama(width=1024, hidden=4096, heads=8, layers=8)
    columns = {"shard": 8, "sharding": SHARDINGS.index(sharding), "microbatches": 4}
    table = PlanTable.build(columns, layouts=[even_layout(layers=8, pipeline=1)])

    def lines(how):
        stacks = {"torch": replace(SOFTWARE["torch"], shard_copies=how)}
        monkeypatch.setattr(import_module("meshwright.cost.stacks"), "SOFTWARE", stacks)
        costs = evaluate(table, model=model, cluster=selene(nodes=1), job=JOB)
        return [float(costs.total[name][0]) for name in (LineName.PARAMETERS, LineName.GRADIENTS)]

    bare, copied = lines(ShardCopies.NONE), lines(ShardCopies.UNITS)
    parameters = model.parameters
    # Embedding and head are units too; every unit is gathered in both passes under zero3.
    assert (copied[0] - bare[0]) * RATE == pytest.approx(gathers * 4.0 * parameters, rel=1e-6)
    assert (copied[1] - bare[1]) * RATE == pytest.approx(scatters * 6.0 * parameters, rel=1e-6)
