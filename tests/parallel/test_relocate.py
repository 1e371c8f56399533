"""State moved in memory between any two plans: to the bit, in the least bytes, and the run goes on as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch

from meshwright.cost.holdings import Contents
from meshwright.parallel import relocate
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import Adafactor, Master, Moments, Optimizer, OptimizerSpec, Sgd
from meshwright.spec.plan import Design, ExpertGrid, Offload, ScheduleKind, Sharding, TensorGrid, Training
from meshwright.spec.routing import Routing
from meshwright.spec.synchronize import GradientSync
from tests.parallel import drawing, draws, offload_cases, relocate_cases
from tests.parallel.cover import covering, covering_pairs
from tests.parallel.drawn import FIXED
from tests.parallel.draws import Draw
from tests.parallel.move_cases import runner
from tests.parallel.relocate_cases import PROGRESS, Processes, Seen
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Workers of its own: after a mesh on some of them they are in unlike numbers of groups."""
    workers = Pool()
    yield workers
    workers.close()


TINY = models.model(layers=2)
Pair = tuple[Draw, Draw, Processes, Processes]
ZERO3 = Sharding.PARAMETERS
SHARDS = Layout(shard=4, sharding=ZERO3, batch=4)
STAGES = Layout(pipeline=2, tensor=2, kind=ScheduleKind.ONE_F_ONE_B, batch=4)
VIRTUAL = Layout(pipeline=2, chunks=2, kind=ScheduleKind.ZERO_BUBBLE_V, shard=2, sharding=Sharding.OPTIMIZER, batch=8)
TWO = Layout(tensor=2, batch=2)
ALONE = Layout(batch=2)
EVERY = (0, 1, 2, 3)
SQUARE = Layout(tensor=4, microbatch=2, batch=4, tensor_grid=TensorGrid.SQUARE)
SHARDED_SQUARE = replace(SQUARE, shard=2, sharding=ZERO3)
CUBE = Layout(tensor=8, microbatch=4, batch=4, tensor_grid=TensorGrid.CUBE)
ROWS = Layout(shard=2, sharding=Sharding.OPTIMIZER, batch=4)
GRID = Layout(
    tensor=2, shard=2, sharding=ZERO3, sequence_parallel=True, experts=ExpertGrid(expert=2, tensor=1), batch=4
)
# What a model is made of, and what steps it.
ALIKE = (
    *("model", "kinds", "factored", "routing", "vocab", "kv_heads", "tied", "positions", "length"),
    *("optimizer", "groups"),
)


def pairs(draws_: list[Draw], *, seed: int) -> list[Pair]:
    """Drawn plans of one model and optimizer, two by two, each on some of the processes of the larger; all of their
    rows have a sequence, and no mask a prefix."""
    random, found = Random(seed), []
    for one, other in zip(draws_[::2], draws_[1::2], strict=False):
        for model in (one.model, other.model):
            kinds = tuple(kind.replace("prefix", "window") for kind in one.kinds)
            first = replace(one, model=model, prefix=False, empty_rows=0, kinds=kinds)
            second = replace(other, prefix=False, empty_rows=0, **{name: getattr(first, name) for name in ALIKE})
            if first.layers == second.layers and not draws.refused(first) and not draws.refused(second):
                wide = max(first.ranks, second.ranks)
                sides = [tuple(sorted(random.sample(range(wide), side.ranks))) for side in (first, second)]
                found.append((first, second, sides[0], sides[1]))
                break
    return sorted(found, key=lambda pair: max(pair[0].ranks, pair[1].ranks))


FEW = covering_pairs(pairs(sorted(FIXED, key=lambda draw: draw.layers), seed=8), count=6)
PARTS = 16


@cache
def many() -> list[Pair]:
    """Pairs of other draws."""
    return pairs(sorted(drawing.legal(300, seed=8), key=lambda draw: draw.layers), seed=8)


def ids(pair: Pair) -> str:
    return " to ".join(str(side) for side in pair)


def check(found: list[Seen], *, counted: bool = True, alone: bool = True) -> None:
    """No tensor differs, the next losses are one device's, and what was sent is the least."""
    for seen in found:
        assert seen.unlike == []
        assert seen.progress == PROGRESS
        if seen.losses and alone:
            assert seen.losses == pytest.approx(found[0].alone, rel=0, abs=1e-9)
    assert any(seen.losses for seen in found)
    if counted:
        assert sum(seen.sent for seen in found) == sum(seen.received for seen in found) == found[0].least


@pytest.mark.parametrize("pair", FEW, ids=ids)
def test_drawn_plans_give_each_other_their_state(pool: Pool, pair: Pair) -> None:
    check_pair(pool, pair)


def test_a_process_that_is_not_in_a_plan_takes_part_where_its_ranks_have_copies_of_a_head(pool: Pool) -> None:
    first = Draw(layers=2, axes=(("tensor", 2),), microbatches=6, recompute=("none", "none"), kv_heads=1)
    second = replace(first, axes=(("shard", 3),), microbatches=2, sharding="zero2")
    check_pair(pool, (first, second, (0, 2), (0, 1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_more_drawn_plans_give_each_other_their_state(pool: Pool, part: int) -> None:
    for pair in many()[part::PARTS]:
        check_pair(pool, pair)


def check_pair(pool: Pool, pair: Pair) -> None:
    one, other, ours, theirs = pair
    ranks = max(one.ranks, other.ranks)
    check(pool.run(relocate_cases.moved, draws.build(one), draws.build(other), ours, theirs, None, ranks=ranks))


@pytest.mark.parametrize(
    ("one", "other", "ours", "theirs"),
    [
        (SHARDS, STAGES, (0, 1, 2, 3), (0, 1, 2, 3)),
        (STAGES, VIRTUAL, (0, 1, 2, 3), (0, 1, 2, 3)),
        (VIRTUAL, TWO, (0, 1, 2, 3), (1, 3)),
        pytest.param(TWO, SHARDS, (0, 2), (0, 1, 2, 3), marks=pytest.mark.slow),
        (ALONE, STAGES, (3,), (0, 1, 2, 3)),
        pytest.param(TWO, TWO, (0, 1), (2, 3), marks=pytest.mark.slow),
    ],
    ids=["stages", "virtual", "shrink", "grow", "from one", "elsewhere"],
)
def test_tied_tables_in_stages_and_worlds_of_other_sizes(
    pool: Pool, one: Layout, other: Layout, ours: Processes, theirs: Processes
) -> None:
    gpt = models.gpt(layers=2)
    check(pool.run(relocate_cases.moved, design(gpt, one), design(gpt, other), ours, theirs, None, ranks=4))


def test_thin_matrices_give_and_take(pool: Pool) -> None:
    thin = models.factored(models.gpt())
    check(pool.run(relocate_cases.moved, design(thin, SHARDS), design(thin, STAGES), EVERY, EVERY, None, ranks=4))


@pytest.mark.parametrize(
    "spec", [Adafactor(), pytest.param(Sgd(momentum=0.0), marks=pytest.mark.slow)], ids=["adafactor", "sgd"]
)
def test_experts_on_a_grid_their_biases_and_other_optimizers(pool: Pool, spec: Optimizer) -> None:
    found = pool.run(
        relocate_cases.moved,
        treated(mixture(), GRID, spec),
        treated(mixture(), SHARDS, spec),
        (0, 1, 2, 3),
        (0, 1, 2, 3),
        None,
        ranks=4,
    )
    check(found)


def test_blocks_that_were_frozen_begin_afresh_and_frozen_ones_leave_their_state(pool: Pool) -> None:
    frozen = design(TINY, STAGES)
    first = frozen.plan.stages[0]
    stages = (replace(first, groups=(replace(first.groups[0], training=Training.FROZEN),)), *frozen.plan.stages[1:])
    frozen = replace(frozen, plan=replace(frozen.plan, stages=stages))
    trained = design(TINY, SHARDS)
    for one, other in ((frozen, trained), (trained, frozen)):
        check(pool.run(relocate_cases.moved, one, other, (0, 1, 2, 3), (0, 1, 2, 3), None, ranks=4))


def test_state_in_the_hosts_memory_moves_too(pool: Pool) -> None:
    away = offload_cases.with_groups(design(TINY, SHARDS), offload=Offload.OPTIMIZER)
    here = design(TINY, TWO)
    check(pool.run(relocate_cases.moved, away, here, (0, 1, 2, 3), (1, 2), None, ranks=4))
    check(pool.run(relocate_cases.moved, here, away, (1, 2), (0, 1, 2, 3), None, ranks=4))


def test_through_a_folder_it_is_the_same(pool: Pool, tmp_path: Path) -> None:
    for place, (ours, theirs) in enumerate((((0, 1, 2, 3), (1, 3)), ((0, 2), (0, 1, 2, 3)))):
        sides = [design(models.gpt(layers=2), STAGES if len(side) == 4 else TWO) for side in (ours, theirs)]
        folder = str(tmp_path / str(place))
        check(pool.run(relocate_cases.moved, *sides, ours, theirs, folder, ranks=4), counted=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [(SQUARE, SHARDS), pytest.param(STAGES, SQUARE, marks=pytest.mark.slow)],
    ids=["square to shards", "stages to square"],
)
def test_tensor_ranks_on_a_square_give_and_take(pool: Pool, one: Layout, other: Layout) -> None:
    check(pool.run(relocate_cases.moved, design(TINY, one), design(TINY, other), EVERY, EVERY, None, ranks=4))


@pytest.mark.slow
def test_tensor_ranks_on_a_cube_give_and_take(pool: Pool) -> None:
    sides = design(TINY, CUBE), design(TINY, SHARDS)
    for one, other in (sides, sides[::-1]):
        ours, theirs = (tuple(range(side.plan.world_size)) for side in (one, other))
        check(pool.run(relocate_cases.moved, one, other, ours, theirs, None, ranks=8))


@pytest.mark.parametrize("layout", [SHARDED_SQUARE, CUBE], ids=str)
def test_what_a_plan_says_of_tensor_ranks_on_a_grid_is_what_is_laid(pool: Pool, layout: Layout) -> None:
    for found in pool.run(relocate_cases.disagreements, design(TINY, layout), ranks=8):
        assert found == []


@pytest.mark.parametrize(
    "form", [*(pytest.param(form, marks=pytest.mark.slow) for form in (Moments.BF16, Moments.FP8)), Moments.DYNAMIC8]
)
def test_narrow_moments_go_as_what_they_stand_for(pool: Pool, tmp_path: Path, form: Moments) -> None:
    """Where the target has the source's blocks not one number changes, in memory and through files."""
    spec = OptimizerSpec(state=form)
    one, other = (treated(TINY, layout, spec) for layout in (ROWS, STAGES))
    for target, ours, theirs, exact in (
        (one, (0, 1), (2, 3), True),
        (other, (0, 2), EVERY, form is Moments.BF16),
    ):
        found = pool.run(relocate_cases.moved, one, target, ours, theirs, None, ranks=4)
        check(found, alone=False)
        assert (sum(seen.rounded for seen in found) == 0) is exact
    found = pool.run(relocate_cases.moved, one, other, (0, 2), EVERY, str(tmp_path / "files"), ranks=4)
    check(found, counted=False, alone=False)


def test_parameters_in_bf16_alone_move_to_the_bit(pool: Pool) -> None:
    spec = OptimizerSpec(state=Moments.BF16, master=Master.BF16_STOCHASTIC)
    layouts = [replace(layout, precision=Precision.BF16) for layout in (SHARDS, STAGES)]
    one, other = (treated(TINY, layout, spec) for layout in layouts)
    check(pool.run(relocate_cases.moved, one, other, EVERY, EVERY, None, ranks=4), alone=False)


@pytest.mark.parametrize("draw", sorted(covering(FIXED, count=6), key=lambda draw: draw.ranks, reverse=True), ids=str)
def test_what_a_plan_says_of_its_state_is_what_is_laid(pool: Pool, draw: Draw) -> None:
    for found in pool.run(relocate_cases.disagreements, draws.build(draw), ranks=draw.ranks):
        assert found == []


def test_what_rounding_left_of_gradients_stays_with_its_plan(pool: Pool) -> None:
    sides = [narrow(design(TINY, Layout(shard=2, sharding=kind, batch=8))) for kind in (ZERO3, Sharding.NONE)]
    for alike, most in pool.run(relocate_cases.left_over, sides[0], sides[0], ranks=2):
        assert alike
        assert most > 0
    for alike, most in pool.run(relocate_cases.left_over, *sides, ranks=2):
        assert not alike
        assert most == 0


def narrow(entry: Design) -> Design:
    return replace(entry, plan=replace(entry.plan, gradients=GradientSync(precision=Precision.FP8)))


def test_low_rank_factors_move_by_what_processes_tell(pool: Pool) -> None:
    found = pool.run(relocate_cases.factors, ranks=4)
    assert all(same for same, *_ in found)
    assert [received for _, _, received, _ in found] == [48, 48 + 80, 96 + 80, 96 + 80]
    assert sum(sent for _, sent, _, _ in found) == found[0][-1] == 48 + 128 + 2 * 176


def test_parameters_alone_go_to_another_role() -> None:
    """As weights to one that generates: the target has no optimizer."""
    entry = design(models.model(), ALONE)
    here, there = runner(entry), runner(entry, seed=9)
    here.step(0)
    source = relocate.state_of(entry, laid=here.laid, optimizer=here.optimizer)
    target = relocate.state_of(entry, laid=there.laid, contents=Contents.PARAMETERS)
    found = relocate.move(source, target, group=None)
    assert found.progress is None
    assert found.counted.sent_bytes == found.least_bytes == 0
    assert found.counted.copied_bytes == sum(x.nbytes for _, x in there.laid.named_parameters())
    for (_, one), (_, other) in zip(here.laid.named_parameters(), there.laid.named_parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    entry = design(models.model(), ALONE)
    here, there = runner(entry), runner(entry, seed=9)
    before = [x.detach().clone() for _, x in there.laid.named_parameters()]
    target = relocate.state_of(entry, laid=there.laid, optimizer=there.optimizer)
    bare = relocate.state_of(entry, laid=here.laid, contents=Contents.PARAMETERS)
    with pytest.raises(ConfigError, match="the source has no optimizer state"):
        relocate.move(bare, target, group=None)
    missing = relocate.state_of(entry, laid=here.laid)
    with pytest.raises(ConfigError, match=r"exp_avg of the source is missing on process 0, not \(64, 32\) float64"):
        relocate.move(missing, target, group=None)
    other = runner(design(models.gpt(), ALONE))
    source = relocate.state_of(other.laid.design, laid=other.laid, optimizer=other.optimizer)
    with pytest.raises(ConfigError, match="move between plans of one model"):
        relocate.move(source, target, group=None)
    for x, (_, now) in zip(before, there.laid.named_parameters(), strict=True):
        assert torch.equal(x, now)


def mixture() -> ModelSpec:
    part = models.mixture(routing=Routing(bias_rate=1e-3))
    layer = replace(models.all_models()["mixture"].layers[0], transform=part)
    return models.model("biased", layer=layer, layers=2)


def treated(model: ModelSpec, layout: Layout, spec: Optimizer) -> Design:
    entry = design(model, layout)
    return replace(entry, job=replace(entry.job, optimizer=spec))
