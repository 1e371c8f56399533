"""parallelize: modules of users give under every plan what they give on one device, in float64 to 1e-9."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import meshwright
from meshwright.parallel.foreign import parallelize
from meshwright.parallel.units import units_of
from meshwright.spec.cluster import Precision
from meshwright.spec.compression import OneBit
from meshwright.spec.degrees import plan_of_degrees
from meshwright.spec.errors import ConfigError, EnvironmentUnfit
from meshwright.spec.exchange import Exchange
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    ExpertGrid,
    Offload,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
    TensorGrid,
    Training,
)
from meshwright.spec.synchronize import GradientSync, Rounds, SyncKind
from tests.parallel import foreign_cases
from tests.parallel.foreign_models import Llama
from tests.parallel.reading_models import Reading
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


@pytest.mark.parametrize(("kind", "degrees"), sampled(CASES, quick=5), ids=str)
def test_a_module_gives_what_it_gives_on_one_device(pool: Pool, kind: str, degrees: dict[str, Any]) -> None:
    expected = reference(kind)
    for found in pool.run(foreign_cases.one_rank, kind, degrees, ranks=ranks(degrees)):
        for value in ("loss", "norm", "after"):
            assert found[value] == pytest.approx(expected[value], abs=TOLERANCE), value
        for part in ("gradients", "parameters"):
            assert found[part].keys() == expected[part].keys()
            for name, x in expected[part].items():
                numpy.testing.assert_allclose(found[part][name], x, atol=TOLERANCE, rtol=0, err_msg=f"{part} {name}")


# Forwards that read a block's parameters outside of its own call, or last in it; and how many of two blocks are sharded
# alone.
ELSEWHERE = {"method": 0, "inner": 1, "weights": 1, "lent": 0, "kept": 0, "wrapped": 0, "last": 2}
READS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((kind, {"shard": 2}) for kind in ELSEWHERE),
    ("lent", {"shard": 2, "recompute": "full"}),
    ("lent", {"replicate": 2, "recompute": "full"}),
    ("checkpointed", {"tensor": 2}),
    ("turned", {"tensor": 2}),
)


@pytest.mark.parametrize(("kind", "degrees"), READS, ids=str)
def test_blocks_may_be_read_wherever_a_forward_does(pool: Pool, kind: str, degrees: dict[str, Any]) -> None:
    expected = foreign_cases.read_on_one_device(kind)
    for found in pool.run(foreign_cases.read_on_one_rank, kind, degrees, ranks=2):
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            numpy.testing.assert_allclose(found[name], x, atol=TOLERANCE, rtol=0, err_msg=name)


def test_a_block_read_elsewhere_that_no_example_showed_is_named(pool: Pool) -> None:
    for said in pool.run(foreign_cases.read_unseen, "method", ranks=2):
        assert said.startswith("Reading.forward: reads parameters of a block outside of the block's own call")
        assert said.endswith("; pass parallelize an example that runs on the meta device, which shows such blocks, or "
                             "shard nothing")  # fmt: skip


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_blocks_that_are_read_outside_of_their_calls_are_not_sharded_alone(kind: str) -> None:
    module = Reading(kind)
    kept = {path: set(vars(owner)) for path, owner in module.named_modules()}
    units = units_of(module, (torch.zeros(1, 4, dtype=torch.int64),), blocks=list(module.blocks))
    assert len(units) == ELSEWHERE[kind]
    assert {path: set(vars(owner)) for path, owner in module.named_modules()} == kept
    assert len(units_of(module, None, blocks=list(module.blocks))) == 2


def test_ranks_of_the_tensor_axis_drop_the_same_of_what_is_whole_and_their_own_of_their_parts(pool: Pool) -> None:
    (one, half), (other, second) = pool.run(foreign_cases.dropped, ranks=2)
    assert one == other
    assert 0.4 < (half == second).mean() < 0.6


def test_a_module_that_a_list_holds_several_times_keeps_its_weights(pool: Pool) -> None:
    assert max(pool.run(foreign_cases.again, ranks=2)) < 1e-5


def test_gradients_of_gradients_are_those_of_one_device(pool: Pool) -> None:
    for apart in pool.run(foreign_cases.penalised, {"tensor": 2}, ranks=2):
        assert max(apart.values()) < 1e-12


def test_gradients_of_gradients_are_refused_where_shards_are_gathered(pool: Pool) -> None:
    for said in pool.run(foreign_cases.penalised, {"shard": 2, "sharding": "zero2"}, ranks=2):
        assert said.startswith("Sequential: gradients that have gradients (create_graph=True)")


@pytest.mark.parametrize("used", ["one.weight", "other.weight"])
def test_a_matrix_all_of_which_is_used_is_whole(pool: Pool, used: str) -> None:
    assert max(pool.run(foreign_cases.summed, used, ranks=2)) < 1e-5


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
HALVES = (replace(PLAIN.first_group, stop=2), replace(PLAIN.first_group, start=2, stop=4))


def with_schedule(**changes: Any) -> Plan:
    return replace(PLAIN, schedule=replace(PLAIN.schedule, **changes))


def with_gradients(**changes: Any) -> Plan:
    return replace(PLAIN, gradients=replace(PLAIN.gradients, **changes))


def with_groups(*groups: BlockGroup) -> Plan:
    return replace(PLAIN, stages=(Stage(rank=0, groups=groups),))


# A plan for every choice that a module of a user's cannot be given, by the field that says so.
REFUSED: tuple[tuple[str, Plan, str], ...] = (
    ("Plan.axes", with_axis(AxisName.PIPELINE), r"plan.axes: pipeline 2: .*module-one-stage.*; use pipeline 1"),
    ("Plan.axes", with_axis(AxisName.CONTEXT), r"plan.axes: context 2: .*module-whole-sequences.*; use context 1"),
    ("Plan.axes", replace(PLAIN, axes=(Axis(name=AxisName.SHARD, size=1),) * 2), r"shard is named 2 times .*once"),
    ("Plan.axes", replace(PLAIN, axes=(Axis(name=AxisName.SHARD, size=0),)), r"shard 0 is not a count .*1 or more"),
    ("Plan.stages", replace(PLAIN, stages=()), r"plan.stages: a stage without blocks .*give every stage a group"),
    ("Plan.stages", replace(PLAIN, stages=PLAIN.stages * 2), r"pipeline 2: a module of yours is not cut into stages"),
    ("Plan.exchange", replace(PLAIN, exchange=Exchange(inner=2)), r"plan.exchange: .*no context axis .*leave it out"),
    ("Plan.experts", replace(PLAIN, experts=ExpertGrid(expert=2)), r"plan.experts: .*no-expert-grid.*; leave it out"),
    ("Plan.tensor_grid", replace(PLAIN, tensor_grid=TensorGrid.SQUARE), r"tensor_grid: .* a square .*; use line"),
    ("Plan.placement", replace(plan_of_degrees(replicate=2), placement=(1, 0)), r"plan.placement: .*not-placed.*order"),
    ("Schedule.kind", with_schedule(kind=ScheduleKind.BREADTH_FIRST), r"schedule.kind: breadth-first .*use 1f1b"),
    ("Schedule.kind", with_schedule(kind=ScheduleKind.ZERO_BUBBLE_H1), r"schedule.kind: zb-h1 .*use 1f1b"),
    ("Schedule.chunks", with_schedule(chunks=2), r"schedule.chunks: 2 chunks .*use 1"),
    ("Schedule.slices", with_schedule(slices=2), r"schedule.slices: 2 slices"),
    ("Schedule.table", with_schedule(table=("0F 0B",)), r"schedule.table: a table of passes beside 1f1b"),
    ("Schedule.paths", with_schedule(paths=("0",)), r"schedule.paths: paths over stages beside 1f1b"),
    ("GradientSync.kind", with_gradients(kind=SyncKind.DILOCO), r"gradients.kind: .* diloco .*; use every_step"),
    ("GradientSync.rounds", with_gradients(rounds=Rounds(every=4)), r"gradients.rounds: .*; leave it out"),
    ("GradientSync.compression", with_gradients(compression=OneBit()), r"compression: .* one_bit .*; leave it out"),
    ("GradientSync.precision", plan_of_degrees(gradients="fp8"), r"gradients.precision: .*; use fp32 or bf16"),
    ("GradientSync.precision", plan_of_degrees(gradients="int8"), r"gradients.precision: .*; use fp32 or bf16"),
    ("GradientSync.precision", with_gradients(precision=Precision.BF16), r"in fp64 do not meet in bf16.*fp64 or fp32"),
    ("BlockGroup.recompute", plan_of_degrees(recompute="selective"), r"groups.recompute: .*; use full or none"),
    ("BlockGroup.precision", plan_of_degrees(precision="fp8"), r"groups.precision: .* fp8 .*; use bf16"),
    ("BlockGroup.tensor", plan_of_degrees(tensor=2), r"example: tensor 2 needs an example"),
    ("BlockGroup.tensor", with_group(tensor=2), r"groups.tensor: 2 is not the size of the tensor axis, 1 .*; use 1"),
    ("BlockGroup.sharding", with_group(sharding=Sharding.PARAMETERS), r"groups.sharding: zero3 has one rank"),
    (
        "BlockGroup.sharding",
        plan_of_degrees(shard=2, sharding="none"),
        r"nothing is sharded over .* 2 .*replicate",
    ),
    ("BlockGroup.sequence_parallel", with_group(sequence_parallel=True), r"groups.sequence_parallel: .*; use false"),
    ("BlockGroup.offload", with_group(offload=Offload.OPTIMIZER), r"groups.offload: .*; use none"),
    ("BlockGroup.training", with_group(training=Training.FROZEN), r"groups.training: .*requires_grad_\(False\)"),
    (
        "BlockGroup.start",
        with_groups(HALVES[0], replace(HALVES[1], start=3)),
        r"groups\[1\]: blocks 3 to 4 do not ",
    ),
    ("BlockGroup.stop", with_group(stop=34), r"hold 34 blocks and Llama has 2 \+ 2 .*stop at 4, or one group hold one"),
    ("BlockGroup.precision", with_groups(HALVES[0], replace(HALVES[1], precision=Precision.FP32)), r"in precision"),
    ("BlockGroup.shards", with_group(sharding=Sharding.PARAMETERS, shards=1), r"groups.shards: .*; leave it out"),
    ("Plan.empty_rows", replace(PLAIN, empty_rows=1), r"plan.empty_rows: 1 empty rows .*; use 0"),
)


@pytest.mark.parametrize(("_field", "plan", "words"), REFUSED, ids=[entry[0] for entry in REFUSED])
def test_what_cannot_be_laid_is_refused_before_anything_is_touched(_field: str, plan: Plan, words: str) -> None:
    module = Llama(kv_heads=2)
    before = {name: id(x) for name, x in module.named_parameters()}
    with pytest.raises(ConfigError, match=words) as caught:
        parallelize(module, plan)
    assert all(problem.where and problem.fix for problem in caught.value.problems)
    assert {name: id(x) for name, x in module.named_parameters()} == before
    assert type(module.layers[0]).__name__ == "LlamaLayer"


def test_no_field_of_a_plan_is_passed_over() -> None:
    """Each is refused where it asks for what a module cannot be given, or is one of the few named here."""
    callers = {"Plan.model", "Plan.cluster", "Plan.sequence_length", "Plan.microbatch", "Schedule.microbatches"}
    whole = {"Plan.schedule", "Plan.gradients", "Plan.schema", "Stage.rank", "Stage.groups"}
    fields = {
        f"{kind.__name__}.{entry.name}"
        for kind in (Plan, Stage, BlockGroup, Schedule, GradientSync)
        for entry in dataclasses.fields(kind)
    }
    assert fields == callers | whole | {field for field, _, _ in REFUSED}


def test_a_module_that_nothing_divides_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"no matrix divides over 2 tensor ranks \(weight: whole .*returns it"
    ) as caught:
        parallelize(nn.Linear(4, 4), plan_of_degrees(tensor=2), example=(torch.zeros(1, 4),))
    assert "\n" not in str(caught.value)


def test_the_nearest_number_of_tensor_ranks_that_divides_is_named() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(ConfigError, match=r"no matrix divides over 3 tensor ranks .*; use tensor 2 or 4$"):
        parallelize(module, plan_of_degrees(tensor=3), example=(torch.zeros(1, 4),))


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
    with pytest.raises(ConfigError, match=r"groups hold 4 blocks and Sequential has 3 \+ 2"):
        parallelize(nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))), plan)


@pytest.mark.parametrize("outside", ["layers.1.self_attn.o_proj", "lm_head"])
def test_blocks_tied_across_cannot_be_sharded(outside: str) -> None:
    module = Llama(kv_heads=2)
    module.layers[0].self_attn.o_proj.weight = module.get_submodule(outside).weight
    with pytest.raises(ConfigError, match=r"layers.0.self_attn.o_proj.weight: is tied .*; untie it"):
        parallelize(module, plan_of_degrees(shard=2))


def test_modules_that_cannot_be_laid_are_refused() -> None:
    for module, words in (
        (nn.Identity(), r"Identity: has no parameters .*; train something"),
        (nn.Sequential(nn.LazyLinear(4)), r"0.weight: has no shape before .*; run one forward"),
        (nn.DataParallel(nn.Linear(4, 4)), r"DataParallel: wraps a module .*; pass the module inside"),
    ):
        with pytest.raises(ConfigError, match=words):
            parallelize(module, PLAIN)


class Scaled(nn.Linear):
    """A matrix and one number."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(()))


class WithTurns(nn.Linear):
    """A matrix and complex numbers that train."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.turns = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("module", "degrees", "words"),
    [
        (Scaled(), {"shard": 2}, r"^scale: is one number .*module-shards-have-rows.*shape \(1,\)"),
        (
            nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 4)),
            {},
            r"0.weight: is in fp64 .*in one dtype .*one-w",
        ),
        (nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), {"tensor": 2}, r"0: max_norm 1 changes rows .*by-backward"),
        (nn.Embedding(4, 4, max_norm=1.0), {"replicate": 2}, r"Embedding: max_norm 1 .*; use max_norm None"),
        (WithTurns(), {"shard": 2}, r"^turns: is complex.*module-shards-real.*view_as_complex"),
        (nn.Sequential(nn.Embedding(4, 4, sparse=True)), {"shard": 2}, r"^0: has sparse .*gradients-dense.*sparse=F"),
    ],
    ids=["number", "widths", "norms of tensor ranks", "norms of replicas", "complex numbers", "sparse gradients"],
)
def test_parameters_that_a_plan_cannot_keep_are_refused_by_name(
    module: nn.Module, degrees: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parallelize(module, plan_of_degrees(precision="fp32", **degrees), example=(torch.zeros(1, 4),))


class Turned(nn.Module):
    """Rotary turns as complex numbers, as Llama's own code has them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Linear(4, 4)
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.ones(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.steps(x).float().unflatten(-1, (2, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(-2)


def test_complex_buffers_stay_complex() -> None:
    module = Turned()
    expected = module(torch.ones(1, 4)).detach()
    laid = parallelize(module, plan_of_degrees(precision="fp32"))
    assert laid.module.turns.dtype is torch.complex64
    torch.testing.assert_close(laid.module(torch.ones(1, 4)).detach(), expected)


def test_as_many_processes_run_as_the_plan_has_ranks() -> None:
    with pytest.raises(EnvironmentUnfit, match="over 2 devices and 1 process runs"):
        parallelize(nn.Linear(4, 4), plan_of_degrees(replicate=2))


def test_one_process_needs_no_group() -> None:
    laid = meshwright.parallelize(Llama(kv_heads=2), meshwright.plan_of_degrees(precision="fp32"))
    assert "layers.*.mlp.gate_proj.weight: whole" in laid.rules.describe()
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
