"""Tensor ranks above the number of key-value heads: several hold the same head, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import cost
from meshwright.spec.exchange import Exchange
from meshwright.spec.model import Layer, ModelSpec, QueryKeyNorm, Rotary
from meshwright.spec.optimizer import Adafactor, Muon, Optimizer, OptimizerSpec, Sgd
from meshwright.spec.plan import Design, ExpertGrid, Recompute, ScheduleKind, Sharding
from tests.parallel import move_cases, parity_cases, relocate_cases
from tests.parallel.parity_cases import Documents
from tests.parallel.test_relocate import check as check_move
from tests.run import dry_cases
from tests.support import models
from tests.support.designs import SEQUENCE, Layout, design
from tests.support.pool import Pool

ADAMW = OptimizerSpec(learning_rate=1e-2, clip_norm=0.5)
ZERO1, ZERO2, ZERO3 = Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS


def with_mixer(**changes: object) -> ModelSpec:
    return models.model(layer=Layer(mixer=models.attention(**changes), transform=models.feed_forward()), layers=2)


TWO = models.model(layers=2)  # 4 query heads and 2 key-value heads
ONE = with_mixer(kv_heads=1)
FULL = with_mixer(qk_norm=QueryKeyNorm.FULL, qkv_bias=True)

UNLIKE = replace(  # one, two and four key-value heads, the middle one of a pair of thin matrices
    models.factored(TWO), layers=(*ONE.layers[:1], *models.factored(TWO).layers[:1], *with_mixer(kv_heads=4).layers[:1])
)
EVERY = {name: models.shallow(spec) for name, spec in models.all_models().items()}

CASES: dict[str, tuple[ModelSpec, Layout]] = {
    "alone": (TWO, Layout(tensor=4, batch=4)),
    "sequence": (TWO, Layout(tensor=4, sequence_parallel=True, recompute=Recompute.FULL, batch=4)),
    "multi-query": (ONE, Layout(tensor=2, batch=4)),
    "multi-query, shards": (ONE, Layout(shard=2, tensor=4, sharding=ZERO3, batch=4)),
    "full norm and biases": (FULL, Layout(tensor=4, batch=4)),
    "zero3": (TWO, Layout(shard=2, tensor=4, sharding=ZERO3, sequence_parallel=True, batch=4)),
    "zero1, full norm": (FULL, Layout(shard=2, tensor=4, sharding=ZERO1, batch=4)),
    "replicas of shards": (ONE, Layout(replicate=2, shard=2, tensor=2, sharding=ZERO2, batch=8)),
    "replicas": (TWO, Layout(replicate=2, tensor=4, batch=4)),
    "stages": (TWO, Layout(pipeline=2, tensor=4, batch=4)),
    "stages in turns": (ONE, Layout(pipeline=2, tensor=2, kind=ScheduleKind.INTERLEAVED, chunks=2, batch=4)),
    "halves of backwards": (TWO, Layout(pipeline=2, tensor=4, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=4)),
    "unlike layers, thin matrices": (UNLIKE, Layout(tensor=4, sequence_parallel=True, batch=4)),
    "unlike layers, zero3": (UNLIKE, Layout(shard=2, tensor=4, sharding=ZERO3, batch=4)),
    "norms of heads": (EVERY["head_norm"], Layout(tensor=4, batch=4)),
    "keys that are values": (EVERY["shared_key_value"], Layout(tensor=4, sequence_parallel=True, batch=4)),
    "sinks and windows": (EVERY["sinks"], Layout(tensor=4, batch=4)),
    "soft cap": (EVERY["softcap"], Layout(tensor=4, batch=4)),
    "experts": (EVERY["mixture"], Layout(shard=2, tensor=4, sharding=ZERO3, sequence_parallel=True, batch=4)),
    "experts on a grid": (
        EVERY["mixture"],
        Layout(
            shard=2, tensor=4, sequence_parallel=True, experts=ExpertGrid(expert=2, tensor=2), sharding=ZERO1, batch=4
        ),
    ),
    "traders of heads": (
        with_mixer(heads=8, kv_heads=2, head_dim=4, rotary=Rotary(dims=4)),
        Layout(context=2, tensor=4, exchange=Exchange(inner=2), batch=4),
    ),
    "context": (TWO, Layout(context=2, tensor=4, sharding=ZERO3, batch=4)),
}
QUICK = ("alone", "multi-query, shards", "zero1, full norm", "unlike layers, thin matrices", "traders of heads")
REST = tuple(name for name in CASES if name not in QUICK)


def check(pool: Pool, entry: Design, *, optimizer: Optimizer = ADAMW, packed: Documents) -> None:
    entry = replace(entry, job=replace(entry.job, optimizer=optimizer))
    found = pool.run(parity_cases.one_rank, entry, packed, ranks=entry.plan.world_size)
    expected = parity_cases.one_device(
        entry.model,
        count=entry.plan.batch,
        length=SEQUENCE,
        z_loss=entry.job.z_loss,
        optimizer=optimizer,
        packed=packed,
    )
    parity_cases.compare(expected, found)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_it_gives_what_one_device_gives(pool: Pool, name: str) -> None:
    model, layout = CASES[name]
    check(pool, design(model, layout, z_loss=1e-3), packed=Documents.TWO)


@pytest.mark.parametrize(
    "optimizer",
    [
        Adafactor(learning_rate=1e-2, clip_norm=0.5),
        pytest.param(Muon(learning_rate=1e-2, clip_norm=0.5), marks=pytest.mark.slow),
        pytest.param(Sgd(learning_rate=1e-2, clip_norm=0.5), marks=pytest.mark.slow),
    ],
    ids=["adafactor", "muon", "sgd"],
)
def test_every_optimizer_keeps_copies_equal(pool: Pool, optimizer: Optimizer) -> None:
    check(pool, design(TWO, CASES["zero3"][1]), optimizer=optimizer, packed=Documents.ONE)


@pytest.mark.parametrize("names", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["a few", "the rest"])
def test_every_byte_is_predicted(names: Sequence[str]) -> None:
    entries = [design(*CASES[name]) for name in names]
    for entry, counted in zip(entries, dry_cases.apart(dry_cases.count_fake, designs=entries, rank=0), strict=True):
        assert dict(cost.traffic(entry, rank=0).bytes) == dict(counted.bytes), entry.plan.describe()


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    """Workers of their own: after a mesh on some of them they are in unlike numbers of groups."""
    made = Pool()
    yield made
    made.close()


SHARDED = Layout(shard=2, tensor=4, sharding=ZERO3, sequence_parallel=True, batch=4)
MOVES = {
    "to stages of fewer": (TWO, SHARDED, Layout(pipeline=2, tensor=2, batch=4), (0, 1, 2, 3)),
    "to one": (ONE, Layout(tensor=4, batch=2), Layout(batch=2), (2,)),
    "between copies": (
        ONE,
        Layout(tensor=4, batch=2),
        Layout(shard=2, tensor=2, sharding=ZERO1, batch=4),
        (0, 1, 2, 3),
    ),
}


@pytest.mark.parametrize(
    "name", [name if name == "between copies" else pytest.param(name, marks=pytest.mark.slow) for name in MOVES]
)
@pytest.mark.parametrize("through", ["memory", pytest.param("files", marks=pytest.mark.slow)])
def test_state_moves_to_and_from_it(workers: Pool, tmp_path: Path, name: str, through: str) -> None:
    model, one, other, theirs = MOVES[name]
    here, there = design(model, one), design(model, other)
    for source, target, ours, yours in ((here, there, None, theirs), (there, here, theirs, None)):
        sides = [
            tuple(range(side.plan.world_size)) if who is None else who
            for side, who in ((source, ours), (target, yours))
        ]
        folder = None if through == "memory" else str(tmp_path / source.plan.digest())
        found = workers.run(relocate_cases.moved, source, target, *sides, folder, ranks=here.plan.world_size)
        check_move(found, counted=through == "memory")


def test_what_a_plan_says_of_its_state_is_what_is_laid(pool: Pool) -> None:
    for entry in (design(UNLIKE, SHARDED), design(FULL, CASES["stages"][1])):
        for found in pool.run(relocate_cases.disagreements, entry, ranks=entry.plan.world_size):
            assert found == []


def test_a_checkpoint_goes_on_with_whole_values(pool: Pool) -> None:
    for _, change in pool.run(move_cases.names_and_round_trip, design(TWO, SHARDED), ranks=8):
        assert change == 0.0
