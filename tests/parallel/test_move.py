"""What one plan trained, any other plan goes on with: the same losses, moments and step counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.spec.errors import ConfigError
from meshwright.spec.exchange import Exchange
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import AxisName, Design, ScheduleKind, Sharding, TensorGrid
from tests.parallel.move_cases import go_on, moved, names_and_round_trip, runner, train
from tests.support.designs import Layout, design, sharded
from tests.support.models import all_models, gpt, shallow
from tests.support.pool import Pool

ONE = Layout(batch=4)
PIPELINE = Layout(pipeline=2, shard=2, sharding=Sharding.PARAMETERS, batch=4)
CHUNKS = Layout(pipeline=2, chunks=2, kind=ScheduleKind.INTERLEAVED, replicate=2, batch=4)
TENSOR = Layout(tensor=2, shard=2, sharding=Sharding.GRADIENTS, sequence_parallel=True, batch=4)
SHARDS = Layout(shard=4, sharding=Sharding.OPTIMIZER, batch=4)
CONTEXT = Layout(context=2, shard=2, sharding=Sharding.PARAMETERS, exchange=Exchange(inner=2), batch=4)
TOKENS = Layout(context=2, pipeline=2, batch=4)
SQUARE = Layout(tensor=4, microbatch=2, batch=4, tensor_grid=TensorGrid.SQUARE)
WIDE = Layout(shard=2, tensor=2, pipeline=2, sharding=Sharding.PARAMETERS, batch=4)


TINY = shallow(all_models()["tiny"])


def of(layout: Layout, model: ModelSpec | None = None) -> Design:
    return design(model or TINY, layout)


def test_blocks_that_are_sharded_in_unlike_ways_go_on_as_others_do(pool: Pool, tmp_path: Path) -> None:
    alike = Layout(shard=2, sharding=Sharding.PARAMETERS, batch=4)
    unlike = sharded(of(alike), "3312")
    expected = pool.run(train, unlike, str(tmp_path / "unlike"), 2, 2, ranks=2)[0]
    for folder, source, target in (("unlike", unlike, of(alike)), ("alike", of(alike), unlike)):
        if source is not unlike:
            again = pool.run(train, source, str(tmp_path / folder), 2, 2, ranks=2)[0]
            assert again == pytest.approx(expected, abs=1e-9)
        for losses, counts in pool.run(go_on, target, str(tmp_path / folder), 2, 2, ranks=2):
            assert losses == pytest.approx(expected[2:], abs=1e-9)
            assert counts == {2.0}


def check_resume(pool: Pool, tmp_path: Path, model: ModelSpec, source: Layout, targets: tuple[Layout, ...]) -> None:
    folder = str(tmp_path / "state")
    expected = pool.run(train, of(source, model), folder, 2, 2, ranks=source.ranks)[0]
    for target in targets:
        for losses, counts in pool.run(go_on, of(target, model), folder, 2, 2, ranks=target.ranks):
            assert losses == pytest.approx(expected[2:], abs=1e-9), target.name
            assert counts == {2.0}, target.name


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        pytest.param(PIPELINE, (CHUNKS,), marks=pytest.mark.slow),
        (CHUNKS, (TENSOR,)),
        pytest.param(TENSOR, (SQUARE,), marks=pytest.mark.slow),
        (SHARDS, (PIPELINE,)),
        pytest.param(SQUARE, (SHARDS,), marks=pytest.mark.slow),
        (CONTEXT, (TOKENS,)),
        pytest.param(TOKENS, (CONTEXT, ONE), marks=pytest.mark.slow),
    ],
    ids=["pipeline", "chunks", "tensor", "shards", "square", "context", "tokens"],
)
def test_every_plan_is_gone_on_from_and_goes_on(
    pool: Pool, tmp_path: Path, source: Layout, targets: tuple[Layout, ...]
) -> None:
    check_resume(pool, tmp_path, TINY, source, targets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (PIPELINE, (SHARDS,)),
        (CHUNKS, (ONE,)),
        (TENSOR, (SHARDS,)),
        (SHARDS, (TENSOR,)),
        (SQUARE, (PIPELINE,)),
        (CONTEXT, (PIPELINE,)),
    ],
    ids=["pipeline", "chunks", "tensor", "shards", "square", "context"],
)
def test_other_plans_go_on_too(pool: Pool, tmp_path: Path, source: Layout, targets: tuple[Layout, ...]) -> None:
    check_resume(pool, tmp_path, TINY, source, targets)


def test_context_ranks_outside_of_shards_give_and_take_their_own_parts(pool: Pool, tmp_path: Path) -> None:
    inside = of(CONTEXT)
    outside = replace(inside, plan=replace(inside.plan, axes=inside.plan.axes[::-1]))
    assert [axis.name for axis in outside.plan.axes if axis.size > 1] == [AxisName.CONTEXT, AxisName.SHARD]
    expected = pool.run(train, outside, str(tmp_path), 2, 2, ranks=4)[0]
    for target in (inside, of(ONE)):
        for losses, counts in pool.run(go_on, target, str(tmp_path), 2, 2, ranks=target.plan.world_size):
            assert losses == pytest.approx(expected[2:], abs=1e-9)
            assert counts == {2.0}
    for before, after in pool.run(moved, outside, inside, str(tmp_path / "there"), ranks=4):
        assert after == pytest.approx(before, abs=1e-9)


def test_a_tied_table_is_one_on_two_stages_and_on_one(pool: Pool, tmp_path: Path) -> None:
    check_resume(pool, tmp_path / "two", gpt(layers=2), PIPELINE, (ONE,))
    check_resume(pool, tmp_path / "one", gpt(layers=2), ONE, (PIPELINE,))


@pytest.mark.slow
def test_a_tied_table_is_one_however_many_copies_there_are(pool: Pool, tmp_path: Path) -> None:
    check_resume(pool, tmp_path, gpt(), PIPELINE, (TENSOR, CHUNKS))


def test_ranks_that_hold_nothing_of_a_small_parameter_do_not_decide_its_step(pool: Pool, tmp_path: Path) -> None:
    tiny = shallow(all_models()["sinks"])  # four sinks a layer, over eight shards
    wide = Layout(shard=8, sharding=Sharding.PARAMETERS, batch=8)
    check_resume(pool, tmp_path, tiny, wide, (wide,))


@pytest.mark.slow
def test_small_parameters_of_many_shards_go_to_one_device(pool: Pool, tmp_path: Path) -> None:
    check_resume(
        pool,
        tmp_path,
        all_models()["sinks"],
        Layout(shard=8, sharding=Sharding.PARAMETERS, batch=8),
        (Layout(batch=8),),
    )


def test_names_are_those_of_the_whole_model_and_whole_values_load(pool: Pool) -> None:
    alone, _ = names_and_round_trip(of(ONE))
    parts = pool.run(names_and_round_trip, of(WIDE), ranks=WIDE.ranks)
    assert set.union(*(names for names, _ in parts)) == alone
    assert {change for _, change in parts} == {0.0}
    assert "optimizer.layers.0.mixer.query.weight.exp_avg_sq" in alone


def test_move_between_two_plans_of_the_same_ranks(pool: Pool, tmp_path: Path) -> None:
    for before, after in pool.run(moved, of(PIPELINE), of(TENSOR), str(tmp_path), ranks=4):
        assert after == pytest.approx(before, abs=1e-9)


def test_state_of_another_shape_is_refused_by_name() -> None:
    from meshwright.parallel import portable

    run = runner(of(ONE))
    values = dict(run.state().tensors)
    values["model.head.norm.weight"] = values["model.head.norm.weight"][:-1]
    del values["optimizer.head.norm.weight.step"]
    with pytest.raises(ConfigError) as error:
        portable.load_state_dict(run.laid, run.optimizer, values)
    assert [str(problem).split(" is ")[0] for problem in error.value.problems] == [
        "state: model.head.norm.weight",
        "state: optimizer.head.norm.weight.step",
    ]
