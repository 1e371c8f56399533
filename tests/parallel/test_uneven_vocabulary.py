"""Tensor ranks share a vocabulary that they do not divide: the last has fewer rows, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import cost
from meshwright.cost.vocabulary import rows_of
from meshwright.search import Scope
from meshwright.search import check as refusals
from meshwright.search.tensor_degrees import legal_degrees
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.optimizer import Adafactor, Muon, Optimizer, OptimizerSpec, Sgd
from meshwright.spec.plan import Design, Recompute, ScheduleKind, Sharding
from tests.parallel import move_cases, parity_cases, relocate_cases
from tests.parallel.parity_cases import Documents, Masks
from tests.parallel.test_relocate import check as check_move
from tests.run import dry_cases
from tests.support import models
from tests.support.designs import SEQUENCE, Layout, design
from tests.support.pool import Pool

ADAMW = OptimizerSpec(learning_rate=1e-2, clip_norm=0.5)
ZERO1, ZERO2, ZERO3 = Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS
# 43 rows are 22 and 21 of two ranks, whose shards of three ranks are 8, 8, 6 and 7, 7, 7: torch tells of others.
VOCAB = 43
THREE = Layer(mixer=models.attention(heads=6, kv_heads=3), transform=models.feed_forward(hidden=48))
SIX_RANKS = Layout(shard=3, tensor=2, sharding=ZERO3, sequence_parallel=True, batch=6)


TINY, TIED, SOFT = (
    models.with_vocab(models.model(layers=2), VOCAB),
    models.with_vocab(models.gpt(layers=2), VOCAB),
    models.with_vocab(models.shallow(models.all_models()["mixture"]), VOCAB),
)
FOUR = models.with_vocab(models.gpt(layers=2), 21)  # of four ranks 6, 6, 6 and 3 rows
WIDE = models.with_vocab(models.model(layer=THREE, layers=2), VOCAB)  # of three ranks 15, 15 and 13

CASES: dict[str, tuple[ModelSpec, Layout]] = {
    "alone": (TINY, Layout(tensor=2, batch=4)),
    "sequence": (TINY, Layout(tensor=2, sequence_parallel=True, recompute=Recompute.FULL, batch=4)),
    "three": (WIDE, Layout(tensor=3, batch=4)),
    "four, tied": (FOUR, Layout(tensor=4, sequence_parallel=True, batch=4)),
    "replicas": (TIED, Layout(replicate=2, tensor=2, batch=4)),
    "shards that torch tells wrongly": (TINY, SIX_RANKS),
    "zero1, tied": (TIED, replace(SIX_RANKS, sharding=ZERO1, sequence_parallel=False)),
    "replicas of shards": (TINY, Layout(replicate=2, shard=2, tensor=2, sharding=ZERO2, batch=8)),
    "context": (TINY, Layout(context=2, tensor=2, sharding=ZERO3, batch=4)),
    "tied across stages": (TIED, Layout(pipeline=2, tensor=2, batch=4)),
    "tied across stages, shards": (TIED, Layout(pipeline=2, shard=2, tensor=2, sharding=ZERO3, batch=4)),
    "stages in turns": (TIED, Layout(pipeline=2, tensor=2, kind=ScheduleKind.INTERLEAVED, chunks=2, batch=4)),
    "experts": (SOFT, Layout(shard=2, tensor=2, sharding=ZERO3, sequence_parallel=True, batch=4)),
}
QUICK = ("three", "four, tied", "shards that torch tells wrongly", "tied across stages, shards")
REST = tuple(name for name in CASES if name not in QUICK)


def check(
    pool: Pool, entry: Design, *, optimizer: Optimizer = ADAMW, masks: Masks = Masks.NONE, packed: Documents
) -> None:
    data = parity_cases.data_of(masks)
    entry = replace(entry, job=replace(entry.job, optimizer=optimizer, data=data))
    found = pool.run(parity_cases.one_rank, entry, packed, masks, ranks=entry.plan.world_size)
    expected = parity_cases.one_device(
        entry.model,
        count=entry.plan.batch,
        length=SEQUENCE,
        z_loss=entry.job.z_loss,
        optimizer=optimizer,
        packed=packed,
        masks=masks,
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
def test_every_optimizer_steps_the_parts_of_a_table(pool: Pool, optimizer: Optimizer) -> None:
    check(pool, design(TINY, SIX_RANKS), optimizer=optimizer, packed=Documents.ONE)


@pytest.mark.parametrize("masks", [Masks.SOME, pytest.param(Masks.HALVES, marks=pytest.mark.slow)])
def test_masked_targets_count_for_nothing(pool: Pool, masks: Masks) -> None:
    check(pool, design(TINY, Layout(shard=2, tensor=2, sharding=ZERO3, batch=4)), masks=masks, packed=Documents.ONE)


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    """Workers of their own: after a mesh on some of them they are in unlike numbers of groups."""
    made = Pool()
    yield made
    made.close()


ONE_EACH = replace(SIX_RANKS, batch=3)
MOVES = {
    "to stages": (ONE_EACH, Layout(pipeline=2, tensor=2, batch=2), (0, 1, 2, 3)),
    "to one": (ONE_EACH, Layout(batch=2), (4,)),
    "to shards": (Layout(pipeline=2, tensor=2, batch=2), Layout(shard=3, sharding=ZERO3, batch=3), (0, 2, 3)),
}


@pytest.mark.parametrize(
    "name", [name if name == "to stages" else pytest.param(name, marks=pytest.mark.slow) for name in MOVES]
)
@pytest.mark.parametrize("through", ["memory", pytest.param("files", marks=pytest.mark.slow)])
def test_state_moves_to_and_from_it(workers: Pool, tmp_path: Path, name: str, through: str) -> None:
    one, other, theirs = MOVES[name]
    here, there = design(TIED, one), design(TIED, other)
    for source, target, ours, yours in ((here, there, None, theirs), (there, here, theirs, None)):
        sides = [
            tuple(range(side.plan.world_size)) if who is None else who
            for side, who in ((source, ours), (target, yours))
        ]
        folder = None if through == "memory" else str(tmp_path / source.plan.digest())
        found = workers.run(relocate_cases.moved, source, target, *sides, folder, ranks=6)
        check_move(found, counted=through == "memory")


def test_what_a_plan_says_of_its_state_is_what_is_laid(pool: Pool) -> None:
    for entry in (design(TIED, SIX_RANKS), design(TIED, CASES["tied across stages, shards"][1])):
        for found in pool.run(relocate_cases.disagreements, entry, ranks=entry.plan.world_size):
            assert found == []


def test_a_checkpoint_goes_on_with_whole_values(pool: Pool) -> None:
    for _, change in pool.run(move_cases.names_and_round_trip, design(TIED, ONE_EACH), ranks=6):
        assert change == 0.0


@pytest.mark.parametrize("names", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["a few", "the rest"])
def test_every_byte_is_predicted(names: Sequence[str]) -> None:
    entries = [design(*CASES[name]) for name in names]
    for entry, counted in zip(entries, dry_cases.apart(dry_cases.count_fake, designs=entries, rank=0), strict=True):
        assert dict(cost.traffic(entry, rank=0).bytes) == dict(counted.bytes), entry.plan.describe()


def test_the_first_rank_has_the_most() -> None:
    assert [rows_of(21, tensor=4, rank=rank) for rank in range(4)] == [(0, 6), (6, 6), (12, 6), (18, 3)]


def test_degrees_are_refused_only_where_the_last_rank_has_nothing() -> None:
    heads = models.model(layer=Layer(mixer=models.attention(heads=8, kv_heads=8), transform=None))
    assert legal_degrees(models.with_vocab(heads, 21), most=64) == (
        1,
        2,
        4,
    )  # three rows each leave nothing to the eighth
    assert legal_degrees(models.with_vocab(heads, 22), most=64) == (1, 2, 4, 8)
    entry = design(models.with_vocab(heads, 21), Layout(tensor=8, batch=4))
    said = [str(problem) for problem in refusals(entry, scopes=frozenset({Scope.PLAN}))]
    told = "8 ranks of 3 entries of a vocabulary of 21 leave the last one none (rule tensor-shares-vocab); choose 4"
    assert any(told in words for words in said)
    allowed = [
        str(problem)
        for problem in refusals(
            design(models.with_vocab(heads, 22), Layout(tensor=8, batch=4)), scopes=frozenset({Scope.PLAN})
        )
    ]
    assert not any("tensor" in words for words in allowed)
