"""Eight and four bits: rounding is that of the format, and every layout trains as one device does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from meshwright.nn import experts
from meshwright.parallel import build_mesh, lay
from meshwright.parallel.quantized import quantized, recipe
from meshwright.spec.cluster import Precision
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.optimizer import Sgd
from meshwright.spec.plan import Dispatch, ExpertGrid, Recompute, Sharding
from tests.parallel import layout_cases, parity_cases, quantized_cases
from tests.parallel.parity_cases import Outcome
from tests.support import models
from tests.support.designs import SEQUENCE, Layout, design
from tests.support.pool import Pool
from tests.support.sampled import sampled

RECIPES = tuple(precision for precision in Precision if precision.quantized)
BATCH, RATE = 4, 0.1
# Features and heads that two tensor ranks share in whole blocks of 32.
WHOLE = models.model(
    "whole",
    layers=2,
    layer=Layer(
        mixer=models.attention(width=64, head_dim=16, kv_heads=4, rotary=None, norm=replace(models.NORM, width=64)),
        transform=models.feed_forward(width=64, hidden=128, norm=replace(models.NORM, width=64)),
    ),
    embedding=replace(models.model().embedding, width=64),
    head=replace(models.model().head, width=64, norm=replace(models.NORM, width=64)),
)
TILES = models.model(
    "tiles",
    layers=1,
    layer=Layer(
        mixer=models.attention(width=32, head_dim=64, kv_heads=4, rotary=None),
        transform=models.feed_forward(hidden=256),
    ),
)
LAYOUTS = (
    Layout(replicate=2, batch=BATCH),
    Layout(shard=2, sharding=Sharding.PARAMETERS, batch=BATCH, recompute=Recompute.FULL),
    Layout(pipeline=2, shard=2, sharding=Sharding.OPTIMIZER, batch=BATCH),
)
TURNS = [(precision, LAYOUTS[place % len(LAYOUTS)]) for place, precision in enumerate(RECIPES)]
REST = [(precision, layout) for precision in RECIPES for layout in LAYOUTS if (precision, layout) not in TURNS]
MIXTURE = models.shallow(models.all_models()["mixture_full"])
# Experts on a grid of their own, whose two ranks send each other rows; their features in whole blocks of 32.
FULL = models.all_models()["mixture_full"].layers[0]
EXPERTS = models.model("experts", layers=2, layer=replace(FULL, transform=replace(FULL.transform, hidden=64)))
GRIDS = (
    Layout(replicate=2, experts=ExpertGrid(expert=2), batch=BATCH),
    Layout(shard=2, sharding=Sharding.PARAMETERS, experts=ExpertGrid(expert=1, tensor=2), batch=BATCH),
    Layout(
        pipeline=2,
        shard=2,
        sharding=Sharding.OPTIMIZER,
        experts=ExpertGrid(expert=2, dispatch=Dispatch.ALL_GATHER),
        recompute=Recompute.FULL,
        batch=BATCH,
    ),
)
# Two slices have a part each of a row, or of a tile of 128.
CUT = (Precision.FP8_ROW, Precision.FP8_BLOCK)
ON_GRID = [
    (precision, layout)
    for layout in GRIDS
    for precision in RECIPES
    if precision not in CUT or (layout.experts is not None and layout.experts.tensor == 1)
]
DIVIDED = Layout(tensor=2, sequence_parallel=True, batch=BATCH)


@cache
def reference(model: ModelSpec, precision: Precision, parts: int = 1, together: int = 1) -> Outcome:
    return quantized_cases.one_device(
        model, precision, count=BATCH, length=SEQUENCE, rate=RATE, parts=parts, together=together
    )


def check(
    pool: Pool, model: ModelSpec, precision: Precision, layout: Layout, *, parts: int = 1, together: int = 1
) -> None:
    spec = Sgd(learning_rate=RATE, momentum=0.0, clip_norm=None)
    entry = design(model, layout, optimizer=spec)
    found = pool.run(quantized_cases.one_rank, entry, precision, ranks=layout.ranks)
    parity_cases.compare(reference(model, precision, parts, together), found)


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_rounding_is_bit_by_bit_that_of_the_format(precision: Precision, operand: int) -> None:
    """Blocks whole and cut, values of every size, zeros, a block of zeros, halves between two numbers."""
    generator = torch.Generator().manual_seed(operand)
    x = torch.randn(130, 150, generator=generator) * torch.logspace(-6, 2, 150)
    x[:, 32:64], x[5] = 0.0, torch.linspace(-6.0, 6.0, 150)
    how = recipe(precision)
    assert how is not None
    (found,) = quantized([(x, (how.activation, how.weight, how.gradient)[operand])], None)
    assert torch.equal(found, quantized_cases.rounded(x, precision, operand))
    assert not torch.equal(found, x)


@pytest.mark.parametrize(("precision", "layout"), sampled(TURNS, quick=2), ids=str)
def test_a_layout_that_divides_no_scale_trains_as_one_device(pool: Pool, precision: Precision, layout: Layout) -> None:
    check(pool, MIXTURE, precision, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "layout"), REST, ids=str)
def test_every_recipe_does_so_in_every_layout(pool: Pool, precision: Precision, layout: Layout) -> None:
    check(pool, MIXTURE, precision, layout)


@pytest.mark.parametrize(("precision", "layout"), sampled(ON_GRID, quick=3), ids=str)
def test_experts_on_a_grid_round_the_rows_that_all_ranks_send_them(
    pool: Pool, precision: Precision, layout: Layout
) -> None:
    check(pool, EXPERTS, precision, layout, together=2)


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        (WHOLE, Precision.FP8),
        pytest.param(TILES, Precision.FP8_BLOCK, marks=pytest.mark.slow),
        pytest.param(WHOLE, Precision.MXFP8, marks=pytest.mark.slow),
        pytest.param(WHOLE, Precision.NVFP4, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, ModelSpec) else value.value,
)
def test_tensor_ranks_that_share_whole_blocks_do_so_too(pool: Pool, model: ModelSpec, precision: Precision) -> None:
    """The scale of a tensor is that of its largest element on any rank."""
    check(pool, model, precision, DIVIDED)


def test_a_row_that_tensor_ranks_share_has_a_scale_of_each_part(pool: Pool) -> None:
    check(pool, WHOLE, Precision.FP8_ROW, DIVIDED, parts=2)
    whole, parted = reference(WHOLE, Precision.FP8_ROW), reference(WHOLE, Precision.FP8_ROW, 2)
    assert whole.loss != parted.loss
    assert parted.loss == pytest.approx(whole.loss, abs=0.01)


@pytest.mark.parametrize("precision", sampled(RECIPES, quick=2))
def test_training_stays_near_bf16(precision: Precision) -> None:
    layout = Layout(batch=4)
    tiny = models.model()
    exact = layout_cases.losses(design(tiny, replace(layout, precision=Precision.BF16)), 8)
    found = layout_cases.losses(design(tiny, replace(layout, precision=precision)), 8)
    assert found[0] == pytest.approx(exact[0], abs=0.2 if precision is Precision.NVFP4 else 0.05)
    assert found[-1] < 0.5 * found[0]
    assert found[0] != exact[0]


def test_products_outside_layers_and_of_gates_are_left_as_they_are() -> None:
    entry = design(models.all_models()["mixture_full"], Layout(batch=4, precision=Precision.MXFP8))
    laid = lay(entry, build_mesh(entry.plan, device_type="cpu", kv_heads=entry.model.kv_heads), device="cpu", seed=0)
    changed = {name for name, module in laid.parts[0].named_modules() if getattr(module, "product", None) is not None}
    layer = {name.removeprefix("layers.0.") for name in changed if name.startswith("layers.0.")}
    assert layer == {
        *(f"mixer.{name}" for name in ("query", "key", "value", "output")),
        *(f"transform.shared.{name}" for name in ("gate", "up", "down")),
        "transform.experts",
    }
    assert all(name.startswith("layers.") for name in changed)


def test_experts_round_their_operands_where_one_kernel_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator has one for bf16, which is what their rows are."""
    losses = []
    for grouped in (False, True):
        monkeypatch.setattr(experts, "suits_grouped", lambda *_, grouped=grouped: grouped)
        entry = design(models.all_models()["mixture"], Layout(batch=4, precision=Precision.FP8))
        losses.append(layout_cases.losses(entry, 2))
    assert losses[0] == losses[1]
