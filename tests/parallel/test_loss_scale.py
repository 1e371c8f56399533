"""Losses that go backward several times as large: gradients are the same bit by bit where nothing is lost, and small
ones of fp16 are there at all."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from meshwright.search import RULES
from meshwright.spec.cluster import Precision
from meshwright.spec.optimizer import Master, OptimizerSpec
from meshwright.spec.plan import Design, ExpertGrid, Recompute, ScheduleKind, Sharding
from tests.parallel import layout_cases, loss_scale_cases
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool
from tests.support.sampled import sampled

TINY, MODELS = models.model(), models.all_models()
BALANCED = models.routed(MODELS["mixture_full"], models.ROUTINGS["balanced"])
SHARDS = Layout(shard=2, sharding=Sharding.PARAMETERS, batch=4)
REPLICAS = Layout(replicate=2, batch=4)


def eight_bits(made: Design) -> Design:
    """The same, whose gradients travel in eight bits, with what rounding leaves kept."""
    return replace(made, plan=replace(made.plan, gradients=replace(made.plan.gradients, precision=Precision.INT8)))


CASES = {
    "shards": design(TINY, SHARDS),
    "tensor": design(TINY, Layout(tensor=2, sequence_parallel=True, batch=4)),
    "context": design(TINY, Layout(context=2, batch=4)),
    "tied ends": design(MODELS["tied"], Layout(pipeline=2, batch=4)),
    "tied ends of one rank": design(
        MODELS["tied"], Layout(pipeline=2, chunks=2, kind=ScheduleKind.DUAL_PIPE_V, batch=8)
    ),
    "halves of backwards": design(TINY, Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=4)),
    "slices": design(TINY, Layout(pipeline=2, kind=ScheduleKind.SEQUENCE_1F1B, slices=2, batch=4)),
    "balanced experts": design(BALANCED, Layout(replicate=2, experts=ExpertGrid(expert=2), batch=4)),
    "balanced experts in stages": design(BALANCED, Layout(pipeline=2, recompute=Recompute.FULL, batch=4)),
    "eight bits": eight_bits(design(TINY, REPLICAS)),
}


@pytest.mark.parametrize("name", sampled(CASES, quick=5))
def test_gradients_do_not_depend_on_the_scale_where_nothing_is_lost(pool: Pool, name: str) -> None:
    entry = CASES[name]
    plain = pool.run(loss_scale_cases.gradients, entry, (1.0, 1.0, 1.0), True, ranks=2)
    scaled = pool.run(loss_scale_cases.gradients, entry, (2.0**9, 2.0**4, 1.0), True, ranks=2)
    for one, other in zip(plain, scaled, strict=True):
        for (loss, gradients), (loss_again, again) in zip(one, other, strict=True):
            assert loss == loss_again
            assert gradients.keys() == again.keys()
            for parameter, value in gradients.items():
                numpy.testing.assert_array_equal(again[parameter], value, err_msg=parameter)


@pytest.mark.parametrize("layout", [SHARDS, Layout(pipeline=2, batch=4)], ids=str)
def test_fp16_stays_near_full_precision(pool: Pool, layout: Layout) -> None:
    exact = pool.run(layout_cases.losses, design(TINY, layout), 8, ranks=2)[0]
    found = pool.run(layout_cases.losses, design(TINY, replace(layout, precision=Precision.FP16)), 8, ranks=2)[0]
    assert found == pytest.approx(exact, abs=0.01)
    assert found != exact


@pytest.mark.slow
def test_small_gradients_of_fp16_are_there_where_losses_are_scaled(pool: Pool) -> None:
    layout = Layout(batch=4096, replicate=2, microbatch=64)
    half, whole = (design(TINY, replace(layout, precision=kind)) for kind in (Precision.FP16, Precision.FP64))
    ((_, wanted),) = pool.run(loss_scale_cases.gradients, whole, (1.0,), ranks=2)[0]
    ((_, plain),) = pool.run(loss_scale_cases.gradients, half, (1.0,), ranks=2)[0]
    ((_, scaled),) = pool.run(loss_scale_cases.gradients, half, (2.0**16,), ranks=2)[0]

    def off(found: dict[str, numpy.ndarray]) -> float:
        apart = sum(float(((found[name] - value) ** 2).sum()) for name, value in wanted.items())
        return float((apart / sum(float((value**2).sum()) for value in wanted.values())) ** 0.5)

    assert off(scaled) < 0.005
    assert off(plain) > 10 * off(scaled)


def test_parameters_of_bf16_are_not_multiplied_in_fp16() -> None:
    asked = OptimizerSpec(master=Master.BF16_STOCHASTIC)
    made = design(TINY, Layout(precision=Precision.FP16), optimizer=asked)
    rule = next(rule for rule in RULES if rule.name == "runtime-master")
    problem = rule(made)
    assert problem is not None
    assert "that are not multiplied in bf16" in problem.what
