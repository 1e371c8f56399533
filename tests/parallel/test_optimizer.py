"""Every optimizer takes the steps that it takes on one device, in every layout, in float64 to 1e-9."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy
import pytest
import torch

from meshwright.cost import predict
from meshwright.nn import Decoder
from meshwright.parallel import build_mesh, build_optimizer, lay
from meshwright.parallel.muon import newton_schulz
from meshwright.parallel.optimizer import LocalOptimizer
from meshwright.spec.cluster import Precision
from meshwright.spec.optimizer import (
    Adafactor,
    Muon,
    Optimizer,
    OptimizerKind,
    OptimizerSpec,
    ParameterGroup,
    Sgd,
    treatment,
)
from meshwright.spec.plan import ScheduleKind, Sharding
from meshwright.spec.report import MemoryPart
from tests.parallel import move_cases, optimizer_cases, reference_optimizers
from tests.support import models
from tests.support.designs import SEQUENCE, Layout, design, with_speed
from tests.support.pool import Pool
from tests.support.sampled import sampled

TOLERANCE = 1e-9
BATCH = 4
OPTIMIZERS: dict[str, Optimizer] = {
    "muon": Muon(learning_rate=1e-2, clip_norm=0.5),
    "sgd": Sgd(learning_rate=1e-1, weight_decay=0.1, clip_norm=0.5),
    "adafactor": Adafactor(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5),
}
LAYOUTS = (
    Layout(batch=BATCH),
    Layout(replicate=2, batch=BATCH),
    Layout(shard=2, sharding=Sharding.OPTIMIZER, batch=BATCH),
    Layout(shard=2, sharding=Sharding.GRADIENTS, batch=BATCH),
    Layout(tensor=2, batch=BATCH),
    Layout(pipeline=2, batch=BATCH),
    Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS, batch=BATCH),
    Layout(shard=2, tensor=2, sharding=Sharding.PARAMETERS, sequence_parallel=True, batch=BATCH),
    Layout(pipeline=2, shard=2, sharding=Sharding.OPTIMIZER, kind=ScheduleKind.INTERLEAVED, chunks=2, batch=BATCH),
)
# The layouts that cut matrices and stacks of experts in every way.
CUTTING = (
    Layout(shard=2, tensor=2, sharding=Sharding.PARAMETERS, batch=BATCH),
    Layout(pipeline=2, tensor=2, sequence_parallel=True, batch=BATCH),
)

UNEVEN = Layout(shard=8, sharding=Sharding.PARAMETERS, batch=8)
# Not the keys' biases of a model without positions: their gradients are rounding alone, and Adafactor divides by it.
KINDS = {"muon": ("gpt", "mixture_full", "latent"), "sgd": ("gpt",), "adafactor": ("tied", "mixture_full", "latent")}
LIGHT = [
    *((("muon", "adafactor")[place % 2], "tiny", layout) for place, layout in enumerate(LAYOUTS)),
    ("adafactor", "tiny", LAYOUTS[6]),
    ("muon", "tiny", LAYOUTS[7]),
    *(("sgd", "tiny", layout) for layout in (LAYOUTS[2], LAYOUTS[6], LAYOUTS[7])),
    *((kind, "mixture_full", CUTTING[0]) for kind in ("muon", "adafactor")),
    ("muon", "gpt", CUTTING[1]),
    ("adafactor", "tied", CUTTING[1]),
    ("adafactor", "mixture_full", UNEVEN),
]
REST = [
    (kind, name, layout)
    for kind in OPTIMIZERS
    for name in ("tiny", *KINDS[kind])
    for layout in (*LAYOUTS, *CUTTING, UNEVEN)
    if (kind, name, layout) not in LIGHT
]
REST.append(("muon", "sinks", UNEVEN))


@cache
def reference(kind: str, name: str, count: int) -> tuple[list[float], dict[str, numpy.ndarray]]:
    model = models.shallow(models.all_models()[name])
    return optimizer_cases.one_device(model, count=count, length=SEQUENCE, spec=OPTIMIZERS[kind])


def check(pool: Pool, kind: str, name: str, layout: Layout) -> None:
    entry = optimizer_cases.with_optimizer(design(models.shallow(models.all_models()[name]), layout), OPTIMIZERS[kind])
    losses, wanted = reference(kind, name, layout.batch)
    seen = set()
    ranks = pool.run(optimizer_cases.one_rank, entry, ranks=layout.ranks)
    if layout is not UNEVEN:
        told = [stage.parts[MemoryPart.OPTIMIZER] for stage in predict(with_speed(entry)).memory]
        kept = sum(8 * held for _, _, held in ranks)
        assert kept == sum(told) * layout.ranks / layout.pipeline, "state is what the cost model says, to the byte"
    for found, parameters, _ in ranks:
        assert found == pytest.approx(losses, rel=0, abs=TOLERANCE)
        for key, value in parameters.items():
            numpy.testing.assert_allclose(value, wanted[key], rtol=0, atol=TOLERANCE, err_msg=key)
            seen.add(key)
    assert seen == set(wanted)


@pytest.mark.parametrize(("kind", "name", "layout"), sampled(LIGHT, quick=8), ids=str)
def test_an_optimizer_steps_as_on_one_device(pool: Pool, kind: str, name: str, layout: Layout) -> None:
    check(pool, kind, name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "layout"), REST, ids=str)
def test_it_does_so_for_every_kind_of_block(pool: Pool, kind: str, name: str, layout: Layout) -> None:
    check(pool, kind, name, layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(shard=3, sharding=Sharding.PARAMETERS, kind=ScheduleKind.BREADTH_FIRST, chunks=2, batch=6),
        Layout(pipeline=2, shard=3, sharding=Sharding.OPTIMIZER, batch=6),
        Layout(pipeline=2, shard=4, sharding=Sharding.PARAMETERS, kind=ScheduleKind.ZERO_BUBBLE_V, chunks=2, batch=8),
    ],
    ids=["on one rank", "on two", "at both ends of a V"],
)
def test_both_copies_of_a_tied_table_step_alike_to_the_bit(pool: Pool, layout: Layout) -> None:
    entry = optimizer_cases.with_optimizer(
        design(models.shallow(models.all_models()["tied"]), layout), OPTIMIZERS["adafactor"]
    )
    first, *others = [copy for held in pool.run(optimizer_cases.copies, entry, ranks=layout.ranks) for copy in held]
    assert others
    assert all(numpy.array_equal(first, other) for other in others)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_plan_goes_on_from_the_state_of_any_other(pool: Pool, tmp_path: Path, kind: str) -> None:
    tiny = models.shallow(models.all_models()["tiny"])
    first, second = (
        optimizer_cases.with_optimizer(design(tiny, layout), OPTIMIZERS[kind])
        for layout in (
            Layout(pipeline=2, tensor=2, batch=BATCH),
            Layout(shard=2, tensor=2, sharding=Sharding.PARAMETERS, batch=BATCH),
        )
    )
    for before, after in pool.run(move_cases.moved, first, second, str(tmp_path), ranks=4):
        assert after == pytest.approx(before, abs=1e-9)


@pytest.mark.parametrize("spec", [OptimizerSpec(), Sgd(weight_decay=0.1), Sgd(weight_decay=0.1, momentum=0.0)])
def test_the_reference_steps_as_torch_does(spec: OptimizerSpec | Sgd) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.ones(6, 4, dtype=torch.float64) for _ in range(2))
    theirs.requires_grad_()
    rates = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    if isinstance(spec, Sgd):
        optimizer: torch.optim.Optimizer = torch.optim.SGD([theirs], momentum=spec.momentum, **rates)
    else:
        optimizer = torch.optim.AdamW([theirs], betas=(spec.beta1, spec.beta2), eps=spec.epsilon, **rates)
    state: dict[str, torch.Tensor] = {}
    for step in (1, 2, 3):
        theirs.grad = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
        reference_optimizers.update("layers.0.mixer.query.weight", ours, theirs.grad, spec, state, step)
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-15)


def built(spec: Optimizer) -> tuple[LocalOptimizer, dict[str, torch.nn.Parameter]]:
    entry = design(models.all_models()["mixture_full"], Layout(precision=Precision.FP32))
    laid = lay(entry, build_mesh(entry.plan, device_type="cpu"), device="cpu", seed=0)
    return build_optimizer(laid, spec), dict(laid.named_parameters())


def test_groups_override_what_the_job_says_and_the_first_that_says_it_holds() -> None:
    groups = (
        ParameterGroup(names=("layers.0.*",), learning_rate_factor=0.5),
        ParameterGroup(names=("layers.*.mixer.*", "embedding.*"), learning_rate_factor=2.0, weight_decay=0.25),
        ParameterGroup(names=("*.router.*",), kind=OptimizerKind.SGD),
    )
    optimizer, named = built(Muon(weight_decay=0.1, groups=groups))
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def of(name: str) -> tuple[str, float, float]:
        group = found[id(named[name])]
        return type(group["rule"]).__name__, group["factor"], group["weight_decay"]

    assert of("layers.0.mixer.query.weight") == ("MuonRule", 0.5, 0.25)
    assert of("layers.1.mixer.query.weight") == ("MuonRule", 2.0, 0.25)
    assert of("layers.1.transform.experts.down") == ("MuonRule", 1.0, 0.1)
    assert of("layers.1.transform.router.weight") == ("SgdRule", 1.0, 0.1)
    assert of("layers.1.transform.experts.down_bias") == ("AdamWRule", 1.0, 0.0)
    assert of("embedding.tokens.weight") == ("AdamWRule", 2.0, 0.25)
    assert of("head.output.weight") == ("AdamWRule", 1.0, 0.1)
    assert of("layers.1.mixer_norm.weight") == ("AdamWRule", 1.0, 0.0)


def test_the_rate_of_a_group_is_a_multiple_of_the_rate() -> None:
    groups = (ParameterGroup(names=("head.*",), learning_rate_factor=3.0),)
    spec = Sgd(momentum=0.0, groups=groups)
    optimizer, named = built(spec)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    optimizer.step()
    for name, parameter in named.items():
        step = 1.5 if name.startswith("head.") else 0.5
        torch.testing.assert_close(parameter.detach(), before[name] - step)
    assert not any(optimizer.state.values())


def test_a_group_of_another_kind_takes_what_both_have_and_else_its_defaults() -> None:
    spec = Sgd(learning_rate=0.3, groups=(ParameterGroup(names=("head.*",), kind=OptimizerKind.ADAMW),))
    how = treatment(spec, "head.output.weight")
    assert how.rule == OptimizerSpec(learning_rate=0.3, weight_decay=0.0)


@pytest.mark.parametrize("name", models.all_models())
def test_what_is_no_matrix_of_a_layer_is_not_muons(name: str) -> None:
    with torch.device("meta"):
        named = dict(Decoder(models.all_models()[name]).named_parameters())
    for key, parameter in named.items():
        how = treatment(Muon(), key)
        small = reference_optimizers.is_small(key, parameter)
        assert (how.weight_decay == 0.0) == small, key
        assert isinstance(how.rule, Muon) == (key.startswith("layers.") and not small), key


def test_newton_schulz_brings_singular_values_near_one() -> None:
    x = torch.randn(3, 40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(newton_schulz(x, steps=5))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_the_step_of_a_scheduled_run_keeps_factors() -> None:
    """The loop sets `lr` of every group and nothing else."""
    groups = (ParameterGroup(names=("head.*",), learning_rate_factor=3.0),)
    optimizer, _ = built(replace(OptimizerSpec(), groups=groups))
    assert sorted({group["factor"] for group in optimizer.param_groups}) == [1.0, 3.0]
    assert {group["lr"] for group in optimizer.param_groups} == {OptimizerSpec().learning_rate}
