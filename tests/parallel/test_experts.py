"""Experts on a grid of their own give what one device gives, in float64 to 1e-9, however their tokens reach them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.nn.mixture import MixtureOfExperts
from meshwright.parallel import build_mesh, lay, unfit
from meshwright.spec.exchange import Exchange, ExchangeKind, TokenLayout
from meshwright.spec.model import Layer, Mixture, ModelSpec, Routing
from meshwright.spec.plan import Dispatch, ExpertGrid, Recompute, ScheduleKind, Sharding
from meshwright.spec.report import LineName
from tests.parallel import expert_cases
from tests.parallel.parity_cases import Documents
from tests.parallel.test_move import check_resume
from tests.parallel.test_parity import check
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool
from tests.support.sampled import sampled

GATHER = Dispatch.ALL_GATHER
ZERO1, ZERO2, ZERO3 = Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS


def grid(expert: int, tensor: int = 1, dispatch: Dispatch = Dispatch.ALL_TO_ALL) -> ExpertGrid:
    return ExpertGrid(expert=expert, tensor=tensor, dispatch=dispatch)


def model(name: str = "mixed", *, layers: int = 2, **changes: object) -> ModelSpec:
    part: Mixture = models.mixture(experts=8, **changes)
    layer = Layer(mixer=models.attention(), transform=part)
    dense = Layer(mixer=models.attention(), transform=models.feed_forward())
    built = models.model(name, layer=layer, layers=layers)
    return replace(built, layers=(*built.layers[:-1], dense, built.layers[-1]))


FULL = model(
    "full",
    expert_bias=True,
    router_bias=True,
    shared=models.feed_forward(norm=None, hidden=24, bias=True),
    shared_gate=True,
)
LAYOUTS = (
    # two ranks
    Layout(replicate=2, experts=grid(2), batch=4),
    Layout(shard=2, sharding=ZERO3, experts=grid(2), batch=4),
    Layout(shard=2, sharding=ZERO1, experts=grid(1, 2), batch=4),
    Layout(tensor=2, sequence_parallel=True, experts=grid(2), batch=2),
    Layout(tensor=2, sequence_parallel=True, experts=grid(1, 1), batch=2),
    Layout(replicate=2, experts=grid(2, dispatch=GATHER), batch=4),
    # four ranks: experts over data and tensor ranks together, beside shards of what is left
    Layout(shard=2, tensor=2, sharding=ZERO3, sequence_parallel=True, experts=grid(4), batch=4),
    Layout(shard=2, tensor=2, sharding=ZERO2, sequence_parallel=True, experts=grid(2), batch=4),
    Layout(shard=4, sharding=ZERO3, experts=grid(2), recompute=Recompute.FULL, batch=8),
    Layout(shard=4, sharding=ZERO1, experts=grid(2, 2), batch=8, microbatch=2),
    Layout(replicate=2, tensor=2, sequence_parallel=True, experts=grid(2, 2), batch=4),
    Layout(replicate=2, shard=2, sharding=ZERO3, experts=grid(2), batch=4),
    Layout(replicate=2, shard=2, sharding=ZERO2, experts=grid(1, 2, GATHER), batch=8),
    Layout(pipeline=2, shard=2, sharding=ZERO1, experts=grid(2), recompute=Recompute.FULL, batch=8),
    Layout(pipeline=2, shard=2, experts=grid(2), sharding=ZERO2, kind=ScheduleKind.INTERLEAVED, chunks=2, batch=4),
    Layout(shard=2, tensor=2, sharding=ZERO1, sequence_parallel=True, experts=grid(2, 2, GATHER), batch=4),
    Layout(shard=4, sharding=ZERO3, experts=grid(1), batch=4),
)
EIGHT = (
    Layout(pipeline=2, shard=2, tensor=2, sharding=ZERO3, sequence_parallel=True, experts=grid(4), batch=8),
    Layout(replicate=2, shard=2, tensor=2, sharding=ZERO3, sequence_parallel=True, experts=grid(2, 2), batch=8),
    Layout(shard=8, sharding=ZERO3, experts=grid(2), batch=8),
    Layout(replicate=4, tensor=2, sequence_parallel=True, experts=grid(8), recompute=Recompute.SELECTIVE, batch=8),
    Layout(replicate=2, shard=4, sharding=ZERO2, experts=grid(8, dispatch=GATHER), batch=8),
)


ROUTINGS = {name: models.ROUTINGS[name] for name in ("capacity", "groups", "bounded prototypes", "balanced")}
DIVIDED = Layout(shard=2, tensor=2, sharding=ZERO3, sequence_parallel=True, experts=grid(4), batch=4)
GATHERED = replace(DIVIDED, experts=grid(2, 2, GATHER), recompute=Recompute.FULL)
ROUTED = [(name, DIVIDED) for name in ROUTINGS] + [
    ("capacity", GATHERED),
    ("balanced", GATHERED),
    ("bounded prototypes", GATHERED),
]
# Without a grid every tensor rank routes every token.
ROUTED += [("groups", replace(DIVIDED, experts=None)), ("balanced", replace(DIVIDED, experts=None))]


@pytest.mark.parametrize("layout", sampled(LAYOUTS, quick=5), ids=str)
def test_a_grid_of_experts_gives_what_one_device_gives(pool: Pool, layout: Layout) -> None:
    check(pool, design(FULL, layout, z_loss=1e-3), packed=Documents.TWO)


@pytest.mark.parametrize(("name", "layout"), sampled(ROUTED, quick=5), ids=str)
def test_every_routing_is_that_of_one_device(pool: Pool, name: str, layout: Layout) -> None:
    check(pool, design(model(name, routing=ROUTINGS[name]), layout), packed=Documents.TWO)


# Choices are counted along sequences of which ranks hold tokens between each other's, and slices come one by one.
SLICED, BALANCED = ScheduleKind.SEQUENCE_1F1B, TokenLayout.BALANCED
ACROSS = Layout(
    context=2,
    tensor=2,
    sharding=ZERO3,
    sequence_parallel=True,
    experts=grid(4),
    exchange=Exchange(layout=TokenLayout.STRIPED),
    batch=4,
)
BY_SLICES = Layout(
    pipeline=2,
    context=2,
    kind=SLICED,
    slices=2,
    microbatch=2,
    recompute=Recompute.FULL,
    exchange=Exchange(kind=ExchangeKind.GATHER, layout=BALANCED),
    batch=4,
)
ALONG = (
    ("both", ACROSS),
    ("both", BY_SLICES),
    ("bounded prototypes", Layout(context=4, exchange=Exchange(inner=2, layout=BALANCED), batch=2)),
    ("softmax", Layout(context=2, exchange=Exchange(layout=TokenLayout.CONTIGUOUS), batch=2)),
    ("balanced", replace(ACROSS, exchange=Exchange(inner=2), recompute=Recompute.FULL)),
    ("capacity", Layout(pipeline=2, kind=SLICED, slices=4, recompute=Recompute.FULL, batch=2)),
    ("capacity", replace(BY_SLICES, shard=2, sharding=ZERO3, experts=grid(2, 2, GATHER), batch=8)),
    ("both", Layout(pipeline=2, tensor=2, kind=SLICED, slices=2, sequence_parallel=True, experts=grid(2), batch=2)),
)
BOTH = {**models.ROUTINGS, "both": replace(models.ROUTINGS["balanced"], capacity=0.75)}


@pytest.mark.parametrize(("name", "layout"), sampled(ALONG, quick=3), ids=str)
def test_choices_are_counted_along_sequences_that_ranks_and_slices_divide(
    pool: Pool, name: str, layout: Layout
) -> None:
    check(pool, design(model(name, routing=BOTH[name]), layout), packed=Documents.TWO)


@pytest.mark.parametrize("layout", [DIVIDED, GATHERED], ids=str)
def test_experts_beside_a_dense_branch_lie_on_a_grid_too(pool: Pool, layout: Layout) -> None:
    check(pool, design(models.beside(), layout, z_loss=1e-3), packed=Documents.TWO)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_they_lie_on_every_grid(pool: Pool, layout: Layout) -> None:
    check(pool, design(models.beside(), layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing_is_so_on_every_grid(pool: Pool, name: str, layout: Layout) -> None:
    check(pool, design(model(name, routing=ROUTINGS[name]), layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", EIGHT, ids=str)
def test_eight_ranks_do_so_too(pool: Pool, layout: Layout) -> None:
    check(pool, design(FULL, layout), packed=Documents.TWO)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_ranks_that_no_token_reaches_give_zero_gradients(pool: Pool, dispatch: Dispatch, tensor: int) -> None:
    """All tokens choose experts of the first rank, and none at all when capacity is spent on nobody."""
    layout = Layout(shard=4, sharding=ZERO3, experts=grid(4 // tensor, tensor, dispatch), batch=4)
    entry = design(model(), layout)
    for found in pool.run(expert_cases.crowded, entry, ranks=4):
        assert max(found.values()) < 1e-12


def test_bytes_of_balanced_tokens_are_those_of_the_formula(pool: Pool) -> None:
    """Per layer and pass: each of T tokens goes to k experts and back, and what slices of them gather."""
    tokens, width, top_k = 16, models.WIDTH, 2
    whole = tokens * top_k * width * 8
    for tensor, dispatch in ((1, Dispatch.ALL_TO_ALL), (2, Dispatch.ALL_TO_ALL), (1, GATHER)):
        layout = Layout(shard=4, sharding=ZERO3, experts=grid(4 // tensor, tensor, dispatch), batch=4)
        for calls in pool.run(expert_cases.balanced_calls, design(model(), layout), ranks=4):
            lines = {line for line, _, _ in calls}
            assert lines == {LineName.EXPERTS, LineName.OTHER}
            moved = [(operation, size) for line, operation, size in calls if line == LineName.EXPERTS]
            if dispatch is GATHER:
                each = tokens * 4 * 8
                assert sorted(moved) == sorted(
                    [("all_gather", each * width), ("all_gather", each * top_k), ("all_to_all", each * width)]
                )
            else:
                gathers = [("all_to_all", tensor * whole)] * (2 if tensor > 1 else 0)
                assert moved == [("all_to_all", whole), *gathers, ("all_to_all", whole)]


MIXED = model("balanced", routing=ROUTINGS["groups"])
TWO = Layout(shard=4, sharding=ZERO3, experts=grid(2), batch=8)
FOUR = Layout(replicate=2, tensor=2, sequence_parallel=True, experts=grid(4), batch=8)
HALVES = Layout(shard=4, sharding=ZERO2, experts=grid(2, 2), batch=8)


def test_state_goes_from_a_grid_to_none_and_back(pool: Pool, tmp_path: Path) -> None:
    none = Layout(pipeline=2, shard=2, sharding=ZERO1, batch=8)
    check_resume(pool, tmp_path / "two", MIXED, TWO, (none,))
    check_resume(pool, tmp_path / "none", MIXED, none, (HALVES,))


@pytest.mark.slow
def test_state_goes_between_more_grids(pool: Pool, tmp_path: Path) -> None:
    check_resume(pool, tmp_path / "two", MIXED, TWO, (FOUR, HALVES))
    check_resume(pool, tmp_path / "four", MIXED, FOUR, (TWO,))


def test_what_no_grid_can_lay_is_said_by_name() -> None:
    layout = Layout(tensor=2, replicate=2, experts=grid(3, 3), batch=4)
    text = "\n".join(str(problem) for problem in unfit(design(model(), layout)))
    for part in ("do not divide 4 ranks", "tensor ranks hold the same tokens", "do not divide 8 experts of 16"):
        assert part in text


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_the_load_told_is_the_most_over_the_mean(recompute: Recompute) -> None:
    entry = design(model(routing=Routing(bias_rate=0.01)), Layout(batch=4, recompute=recompute))
    laid = lay(entry, build_mesh(entry.plan, device_type="cpu"), device="cpu", seed=1)
    tokens = torch.arange(4 * 17).view(4, 17) % models.VOCAB
    laid.step(tokens[:, :-1], tokens[:, 1:])
    mixtures = [part for part in laid.parts[0].modules() if isinstance(part, MixtureOfExperts)]
    assert len(mixtures) == 2
    counts = torch.stack([part.chosen for part in mixtures]).double()
    assert counts.sum(dim=1).tolist() == [4 * 16 * 2] * 2
    assert float(laid.expert_load()) == pytest.approx(float((counts.amax(1) / counts.mean(1)).amax()))
    laid.evaluate(tokens[:, :-1], tokens[:, 1:])
    assert float(laid.expert_load()) == pytest.approx(float((counts.amax(1) / counts.mean(1)).amax()))
    for part, row in zip(mixtures, counts, strict=True):
        assert part.balance.tolist() == pytest.approx((0.01 * torch.sign(row.mean() - row)).tolist())


def test_a_model_without_experts_has_no_load() -> None:
    entry = design(models.model(), Layout(batch=1))
    laid = lay(entry, build_mesh(entry.plan, device_type="cpu"), device="cpu", seed=1)
    assert laid.expert_load() is None
