"""parallelize: modules of users give under every plan what they give on one device, in float64 to 1e-9."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import meshwright
from meshwright.parallel.foreign import parallelize
from meshwright.spec.degrees import plan_of_degrees
from meshwright.spec.errors import ConfigError, EnvironmentUnfit
from meshwright.spec.plan import Axis, AxisName, ExpertGrid, Plan, Recompute, ScheduleKind, Stage
from tests.parallel import foreign_cases
from tests.parallel.foreign_models import Llama
from tests.support.pool import Pool
from tests.support.sampled import sampled

TOLERANCE = 1e-9
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"tensor": 2}),
    ("gpt2", {"tensor": 2, "recompute": "full"}),
    ("t5", {"tensor": 2}),
    ("mixtral", {"tensor": 2, "recompute": "full"}),
    ("encoder", {"tensor": 2}),
    ("gpt2", {"replicate": 2}),
    ("qwen", {"shard": 2, "sharding": "zero1", "recompute": "full"}),
    ("t5", {"shard": 2, "sharding": "zero2"}),
    ("llama", {"tensor": 2, "shard": 2}),
    ("gpt2", {"tensor": 2, "shard": 2, "recompute": "full"}),
    ("t5", {"tensor": 2, "shard": 2, "sharding": "zero1"}),
    ("encoder", {"tensor": 2, "shard": 2, "sharding": "zero2"}),
    ("qwen", {"tensor": 2, "replicate": 2}),
    ("mixtral", {"tensor": 4}),
    ("qwen", {"tensor": 4}),  # two heads of keys on four ranks
    ("llama", {"replicate": 2, "shard": 2}),
)


@cache
def reference(kind: str) -> foreign_cases.Step:
    return foreign_cases.one_device(kind)


def ranks(degrees: dict[str, Any]) -> int:
    return plan_of_degrees(**degrees).world_size


@pytest.mark.parametrize(("kind", "degrees"), sampled(CASES, quick=8), ids=str)
def test_a_module_gives_what_it_gives_on_one_device(pool: Pool, kind: str, degrees: dict[str, Any]) -> None:
    expected = reference(kind)
    for found in pool.run(foreign_cases.one_rank, kind, degrees, ranks=ranks(degrees)):
        for value in ("loss", "norm", "after"):
            assert found[value] == pytest.approx(expected[value], abs=TOLERANCE), value
        for part in ("gradients", "parameters"):
            assert found[part].keys() == expected[part].keys()
            for name, x in expected[part].items():
                numpy.testing.assert_allclose(found[part][name], x, atol=TOLERANCE, rtol=0, err_msg=f"{part} {name}")


def test_ranks_of_the_tensor_axis_drop_the_same(pool: Pool) -> None:
    one, other = pool.run(foreign_cases.dropped, ranks=2)
    assert one == other


def test_a_module_without_memory_is_given_weights_later(pool: Pool) -> None:
    for holds, apart in pool.run(foreign_cases.without_memory, ranks=2):
        assert holds
        assert 0.0 < apart < 0.1


def with_axis(name: AxisName) -> Plan:
    return replace(plan_of_degrees(precision="fp64"), axes=(Axis(name=name, size=2),))


def with_group(**changes: Any) -> Plan:
    plan = plan_of_degrees(precision="fp64")
    group = replace(plan.first_group, **changes)
    return replace(plan, stages=(replace(plan.stages[0], groups=(group,)),))


PLAIN = plan_of_degrees(precision="fp64")
REFUSED = (
    (with_axis(AxisName.PIPELINE), r"plan.axes: pipeline 2: .*; use pipeline 1"),
    (with_axis(AxisName.CONTEXT), r"plan.axes: context 2: .*; use context 1"),
    (replace(PLAIN, experts=ExpertGrid(expert=2)), r"plan.experts: .*; leave it out"),
    (replace(PLAIN, schedule=replace(PLAIN.schedule, slices=2)), r"plan.schedule.slices: 2 slices"),
    (replace(PLAIN, schedule=replace(PLAIN.schedule, kind=ScheduleKind.BREADTH_FIRST)), r"schedule.kind: .*use 1f1b"),
    (plan_of_degrees(gradients="fp8"), r"plan.gradients.precision: .*; use bf16 or fp32"),
    (plan_of_degrees(recompute="selective"), r"groups.recompute: .*; use full or none"),
    (plan_of_degrees(precision="fp8"), r"groups.precision: .* fp8; use bf16"),
    (plan_of_degrees(tensor=2), r"example: tensor 2 needs an example"),
    (with_group(sequence_parallel=True), r"groups.sequence_parallel: .*; use false"),
)


@pytest.mark.parametrize(("plan", "words"), REFUSED, ids=lambda entry: entry if isinstance(entry, str) else "")
def test_what_cannot_be_laid_is_refused_before_anything_is_touched(plan: Plan, words: str) -> None:
    module = Llama(kv_heads=2)
    before = {name: id(x) for name, x in module.named_parameters()}
    with pytest.raises(ConfigError, match=words):
        parallelize(module, plan)
    assert {name: id(x) for name, x in module.named_parameters()} == before
    assert type(module.layers[0]).__name__ == "LlamaLayer"


def test_a_module_that_nothing_divides_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no matrix divides over 2 tensor ranks: weight: whole .*returns it"):
        parallelize(nn.Linear(4, 4), plan_of_degrees(tensor=2), example=(torch.zeros(1, 4),))


def test_recompute_needs_blocks() -> None:
    with pytest.raises(ConfigError, match=r"Linear: no list of alike blocks"):
        parallelize(nn.Linear(4, 4), plan_of_degrees(recompute="full"))


def test_blocks_recompute_as_their_group_says() -> None:
    """A plan counts a block before the repeated ones and one after."""
    plan = plan_of_degrees(precision="fp64")
    first = replace(plan.first_group, stop=2, recompute=Recompute.FULL)
    plan = replace(plan, stages=(Stage(rank=0, groups=(first, replace(plan.first_group, start=2, stop=4))),))
    laid = parallelize(Llama(kv_heads=2), plan)
    assert ["Recomputed" in type(layer).__name__ for layer in laid.module.layers] == [True, False]
    with pytest.raises(ConfigError, match=r"recompute differently over 4 blocks and the module has 3 \+ 2"):
        parallelize(nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))), plan)


def test_blocks_tied_across_cannot_be_sharded() -> None:
    module = Llama(kv_heads=2)
    module.layers[0].self_attn.o_proj.weight = module.lm_head.weight
    with pytest.raises(ConfigError, match=r"layers.0.self_attn.o_proj.weight: is tied .*; untie it"):
        parallelize(module, plan_of_degrees(shard=2))


def test_as_many_processes_run_as_the_plan_has_ranks() -> None:
    with pytest.raises(EnvironmentUnfit, match="over 2 devices and 1 processes"):
        parallelize(nn.Linear(4, 4), plan_of_degrees(replicate=2))


def test_one_process_needs_no_group() -> None:
    laid = meshwright.parallelize(Llama(kv_heads=2), meshwright.plan_of_degrees(precision="fp32"))
    laid.backward(laid.module(torch.zeros(1, 4, dtype=torch.int64)).logsumexp(-1).mean())
    assert float(laid.clip_norm(1e-3)) > 1e-3
    assert float(laid.gradient_norm()) == pytest.approx(1e-3)


def test_a_state_that_is_not_the_modules_is_refused() -> None:
    laid = parallelize(nn.Linear(4, 4), plan_of_degrees(precision="fp32"))
    with pytest.raises(ConfigError, match=r"weight: has shape \(2, 4\) and not \(4, 4\)(.|\n)*bias: is missing"):
        laid.load_state_dict({"weight": torch.zeros(2, 4)})


def test_degrees_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"tensor: 0 is no whole number from 1 on; use 1"):
        plan_of_degrees(tensor=0)
    with pytest.raises(ConfigError) as caught:
        plan_of_degrees(tensor="2", shard=2.0, replicate=True, microbatches=None, precision=16)  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == [
        "replicate", "shard", "tensor", "microbatches", "precision",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"sharding: 'zero4' is not a choice; use none, zero1, zero2, zero3"):
        plan_of_degrees(sharding="zero4")
