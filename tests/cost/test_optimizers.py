"""Bytes and seconds of optimizers: against hand counts, and what must rise or fall."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import PlanTable, evaluate
from meshwright.cost.optimizers import least_state, mean_moments
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.optimizer import (
    Adafactor,
    Muon,
    Optimizer,
    OptimizerKind,
    OptimizerSpec,
    ParameterGroup,
    Sgd,
)
from meshwright.spec.report import LineName, MemoryPart
from tests.cost.cost_examples import even_layout, llama, selene

MODEL = llama(width=512, hidden=1408, layers=3, vocab=2048, heads=8)
KEYS = MODEL.layers[0].mixer.kv_heads * MODEL.layers[0].mixer.head_dim
LAYER = sum(layer.matrix_parameters for layer in MODEL.layers)
REST = MODEL.parameters - LAYER
ADAM = (OptimizerSpec(),)
SPECS: tuple[Optimizer, ...] = (*ADAM, Muon(), Sgd(), Sgd(momentum=0.0), Adafactor())


def costs(spec: Optimizer, **columns: object):
    table = PlanTable.build(columns, layouts=[even_layout(layers=3, pipeline=1)])
    job = JobSpec(sequence_length=512, data=DataSpec(document_mask=False), optimizer=spec)
    return evaluate(table, model=MODEL, cluster=selene(nodes=1), job=job)


def kept(spec: Optimizer, **columns: object) -> float:
    return float(costs(spec, **columns).memory[MemoryPart.OPTIMIZER][0, 0])


def seconds(spec: Optimizer, **columns: object) -> float:
    return float(costs(spec, **columns).parts[LineName.OPTIMIZER][0])


def test_state_is_what_a_hand_counts() -> None:
    assert kept(OptimizerSpec()) == 8.0 * MODEL.parameters
    assert kept(Muon()) == 4.0 * LAYER + 8.0 * REST
    assert kept(Sgd()) == 4.0 * MODEL.parameters
    assert kept(Sgd(momentum=0.0)) == 0.0
    width, hidden, vocab = 512, 1408, 2048
    attention, feed_forward = 2 * (width + width) + 2 * (KEYS + width), 3 * (width + hidden)
    means = 3 * (attention + feed_forward) + 2 * (vocab + width)
    norms = 2 * 3 * width + width
    assert kept(Adafactor()) == 4.0 * (means + norms)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}")
def test_state_is_divided_by_shards_and_means_across_them_are_not(spec: Optimizer) -> None:
    whole, shared = kept(spec), kept(spec, shard=8, sharding=3)
    if isinstance(spec, Adafactor):
        assert whole / 8 < shared < whole
    else:
        assert shared == whole / 8
    assert mean_moments(MODEL, spec) * 4.0 * MODEL.parameters == pytest.approx(whole)
    assert least_state(spec, wide=np.array([4.0]))[0] * MODEL.parameters <= whole


def test_a_group_of_another_kind_is_priced_so() -> None:
    groups = (ParameterGroup(names=("layers.1.*",), kind=OptimizerKind.SGD),)
    layer = MODEL.layers[1].parameters
    assert kept(OptimizerSpec(groups=groups)) == pytest.approx(8.0 * MODEL.parameters - 4.0 * layer)
    usual = (ParameterGroup(names=("layers.1.*",), weight_decay=0.5),)
    assert kept(OptimizerSpec(groups=usual)) == kept(OptimizerSpec())
    assert seconds(OptimizerSpec(groups=usual)) == seconds(OptimizerSpec())


def test_a_step_of_more_passes_takes_longer_and_sharing_it_less() -> None:
    plain, momentum, adam = (seconds(spec) for spec in (Sgd(momentum=0.0), Sgd(), OptimizerSpec()))
    assert plain < momentum < adam < seconds(Adafactor())
    assert seconds(Muon(steps=5)) > seconds(Muon(steps=1)) > adam
    alone, shared = seconds(Muon()), seconds(Muon(), shard=8, sharding=1)
    assert shared < alone
    tensor = seconds(Muon(), tensor=4)
    assert tensor < alone


def test_products_of_newton_schulz_are_two_of_the_short_side_and_one_of_its_square() -> None:
    """What five more steps add is their FLOPs at the device's rate or less of it."""
    more = seconds(Muon(steps=10)) - seconds(Muon(steps=5))
    flops = 0.0
    for rows, columns, number in ((512, 512, 2 * 3), (KEYS, 512, 2 * 3), (512, 1408, 3 * 3)):
        flops += 5 * number * (2 * 2.0 * rows * rows * columns + 2.0 * rows**3)
    peak = max(selene(nodes=1).groups[0].device.peak_flops.values())
    assert more > flops / peak
    assert more < 100.0 * flops / peak


def test_adamw_is_priced_as_before_groups_were_there() -> None:
    """The plain path is exact: two moments of what a rank owns, whatever the layout."""
    columns = {"shard": [1, 2, 8], "sharding": [0, 1, 3], "tensor": [4, 2, 1], "sequence_parallel": [0, 1, 0]}
    found = costs(OptimizerSpec(), **columns)
    named = costs(OptimizerSpec(groups=(ParameterGroup(names=("none",), kind=OptimizerKind.SGD),)), **columns)
    for part in (MemoryPart.OPTIMIZER, MemoryPart.GRADIENTS):
        np.testing.assert_allclose(named.memory[part], found.memory[part], rtol=1e-12)
    np.testing.assert_allclose(named.step_seconds, found.step_seconds, rtol=1e-12)


def test_whoever_holds_a_tied_table_twice_keeps_its_state_twice() -> None:
    tied = replace(MODEL, head=replace(MODEL.head, tied=True))
    layout = even_layout(layers=3, pipeline=2)
    table = PlanTable.build({"pipeline": 2, "microbatches": 2}, layouts=[layout])
    for spec in SPECS:
        job = JobSpec(sequence_length=512, data=DataSpec(document_mask=False), optimizer=spec)
        found = evaluate(table, model=tied, cluster=selene(nodes=1), job=job)
        ends = found.memory[MemoryPart.OPTIMIZER][0]
        table_bytes = mean_moments(tied, spec) * 4.0 * tied.parameters
        copy = {"adamw": 8.0, "muon": 8.0}.get(spec.kind, 4.0) * 2048 * 512
        if isinstance(spec, Sgd) and not spec.momentum:
            copy = 0.0
        if isinstance(spec, Adafactor):
            copy = 4.0 * (2048 + 512)
        assert ends.sum() == pytest.approx(table_bytes + copy)
