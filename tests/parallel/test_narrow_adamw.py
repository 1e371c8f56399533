"""AdamW whose moments take two bytes or one, and whose parameters are bf16 alone: against what their papers say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.cost import predict
from meshwright.cost.optimizers import step_kernels
from meshwright.parallel.narrow_adamw import NarrowAdamWRule
from meshwright.parallel.packed import Packing, dynamic_map, empty
from meshwright.parallel.stochastic import key_of, places, random_bits, rounded
from meshwright.search.runtime_rules import RUNTIME_RULES, untrained
from meshwright.spec.cluster import Precision
from meshwright.spec.optimizer import MOMENT_BLOCK, Master, Moments, OptimizerKind, OptimizerSpec, ParameterGroup
from meshwright.spec.plan import Design, Offload, Sharding
from meshwright.spec.report import MemoryPart
from meshwright.spec.synchronize import GradientSync
from tests.parallel import layout_cases, move_cases, narrow_cases, offload_cases, optimizer_cases
from tests.support import models
from tests.support.designs import SEQUENCE, Layout, design, with_speed
from tests.support.pool import Pool

CPU = torch.device("cpu")
TINY = models.model(layers=2)
BATCH = 4
NARROW = tuple(form for form in Moments if form is not Moments.FP32)
BYTES = tuple(form for form in Moments if form.in_blocks)
ONE = Layout(batch=BATCH)
REPLICAS = Layout(replicate=2, batch=BATCH)
SHARDS = Layout(shard=2, sharding=Sharding.PARAMETERS, batch=BATCH)
GRID = Layout(shard=2, tensor=2, sharding=Sharding.GRADIENTS, sequence_parallel=True, batch=BATCH)
PIPELINE = Layout(pipeline=2, shard=2, sharding=Sharding.OPTIMIZER, batch=BATCH)


def of(layout: Layout, **optimizer: object) -> Design:
    spec = OptimizerSpec(learning_rate=1e-2, clip_norm=0.5, **optimizer)  # type: ignore[arg-type]
    return optimizer_cases.with_optimizer(design(TINY, layout), spec)


def packed(x: torch.Tensor, form: Moments, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What x becomes, its codes, and the codes of that packed again."""
    packing, held = Packing(form, signed=signed, device=CPU), empty(len(x), form=form, device=CPU, wide=x.dtype)
    packing.pack(x, held)
    found, codes = packing.unpack(held, x.dtype), held.codes.clone()
    packing.pack(found, held)
    return found, codes, held.codes


def by_hand(x: torch.Tensor, form: Moments, *, signed: bool) -> torch.Tensor:
    """Block by block and number by number; halfway between two codes of the dynamic map to the smaller one."""
    if form is Moments.BF16:
        return x.to(torch.bfloat16).to(x.dtype)
    blocks = []
    numbers = torch.tensor(dynamic_map(signed), dtype=x.dtype)
    for block in x.split(MOMENT_BLOCK):
        top = block.abs().max().float().to(x.dtype).clamp(min=torch.finfo(torch.float32).tiny)
        if form is Moments.DYNAMIC8:
            near = numbers[((block / top)[:, None] - numbers).abs().argmin(dim=1)]
            least = numbers[numbers > 0].min()
        else:
            near = (block / top * 448.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(x.dtype) / 448.0
            least = torch.tensor(2.0**-9 / 448.0, dtype=x.dtype)
        if not signed:
            near = torch.where((block > 0) & (near == 0), least, near)
        blocks.append(near * top)
    return torch.cat(blocks)


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("signed", [True, False])
def test_numbers_are_packed_block_by_block(form: Moments, signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator, dtype=torch.float64) * torch.logspace(-9, 2, 1000)
    x[300:700] = 0.0  # a block of zeros among them
    x = x if signed else x.square()
    found, codes, again = packed(x, form, signed=signed)
    torch.testing.assert_close(found, by_hand(x, form, signed=signed), rtol=1e-12, atol=0)
    assert torch.equal(codes, again)
    assert not torch.equal(found, x)
    if not signed:
        assert bool(((found > 0) == (x > 0)).all())


def test_the_dynamic_map_has_seven_decades_and_no_two_alike() -> None:
    signed, plain = dynamic_map(True), dynamic_map(False)
    assert (len(set(signed)), len(set(plain))) == (255, 256)
    assert signed[0] == -1.0
    assert signed[-1] == plain[-1] == 1.0
    assert 0.0 in signed
    assert plain[0] == 0.0
    assert 1e-7 < min(x for x in plain if x > 0) < min(x for x in signed if x > 0) < 1e-6


@cache
def reference(form: Moments) -> tuple[list[float], dict[str, numpy.ndarray]]:
    """One device that packs its moments after every step, by hand."""

    def after(state: dict[str, torch.Tensor]) -> None:
        for name, signed in (("first", True), ("second", False)):
            flat = by_hand(state[name].flatten(), form, signed=signed)
            state[name].copy_(flat.view_as(state[name]))

    spec = of(ONE, state=form).job.optimizer
    return optimizer_cases.one_device(TINY, count=BATCH, length=SEQUENCE, spec=spec, after=after)


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        *((form, REPLICAS) for form in NARROW),
        *((Moments.BF16, layout) for layout in (SHARDS, GRID, PIPELINE)),
    ],
    ids=str,
)
def test_a_layout_that_cuts_no_block_steps_as_one_device(pool: Pool, form: Moments, layout: Layout) -> None:
    losses, wanted = reference(form)
    for found, parameters, _ in pool.run(optimizer_cases.one_rank, of(layout, state=form), ranks=layout.ranks):
        assert found == pytest.approx(losses, rel=0, abs=1e-9)
        for name, value in parameters.items():
            numpy.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("form", BYTES)
def test_blocks_that_ranks_cut_are_blocks_of_what_each_has(pool: Pool, form: Moments) -> None:
    losses, _ = reference(form)
    exact, _ = reference_in_full()
    for layout in (SHARDS, GRID):
        for found, _, _ in pool.run(optimizer_cases.one_rank, of(layout, state=form), ranks=layout.ranks):
            assert found == pytest.approx(losses, abs=0.02)
    assert losses == pytest.approx(exact, abs=0.05)
    assert losses != exact


def reference_in_full() -> tuple[list[float], dict[str, numpy.ndarray]]:
    return optimizer_cases.one_device(TINY, count=BATCH, length=SEQUENCE, spec=of(ONE).job.optimizer)


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("layout", [ONE, SHARDS, GRID], ids=str)
def test_state_is_what_the_cost_model_counts(pool: Pool, form: Moments, layout: Layout) -> None:
    entry = of(layout, state=form)
    told = [stage.parts[MemoryPart.OPTIMIZER] for stage in predict(with_speed(entry)).memory]
    kept = [held["optimizer"] for _, held in pool.run(narrow_cases.laid_steps, entry, ranks=layout.ranks)]
    assert kept == told * layout.ranks
    plain = predict(with_speed(of(layout))).memory[0].parts[MemoryPart.OPTIMIZER]
    assert told[0] < 0.35 * plain


@pytest.mark.parametrize(
    "form", [form if form is Moments.DYNAMIC8 else pytest.param(form, marks=pytest.mark.slow) for form in NARROW]
)
def test_any_plan_and_any_form_goes_on_from_any_other(pool: Pool, tmp_path: Path, form: Moments) -> None:
    """A checkpoint has what moments stand for; the same plan reads the same bytes from it."""
    source = of(SHARDS, state=form)
    expected = pool.run(move_cases.train, source, str(tmp_path), 2, 2, ranks=2)[0][2:]
    for target, bound in ((source, 1e-12), (of(GRID, state=form), 0.02), (of(PIPELINE), 0.02), (of(ONE), 0.02)):
        ranks = target.plan.world_size
        for losses, counts in pool.run(move_cases.go_on, target, str(tmp_path), 2, 2, ranks=ranks):
            assert losses == pytest.approx(expected, abs=bound)
            assert counts == {2.0}


class Kernels(TorchDispatchMode):
    """Counts what is computed; what only looks at a tensor in another way starts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not str(func).startswith(
            ("aten.view", "aten.slice", "aten.detach", "aten.alias", "aten.unsqueeze")
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", list(Moments))
@pytest.mark.parametrize("master", list(Master))
def test_a_step_starts_as_many_kernels_as_are_priced(form: Moments, master: Master) -> None:
    spec = OptimizerSpec(state=form, master=master)
    kind = torch.float32 if master is Master.FP32 else torch.bfloat16
    parameter = torch.nn.Parameter(torch.ones(1024, dtype=kind))
    parameter.grad = torch.ones_like(parameter)
    rule = NarrowAdamWRule(spec, keys={parameter: 1})
    state = rule.state(parameter)
    rule.step([parameter], [state], rate=1e-3, weight_decay=0.1)  # the dynamic map is made once
    with Kernels() as counted:
        rule.step([parameter], [state], rate=1e-3, weight_decay=0.1)
    assert counted.number == (step_kernels(spec) or 5)


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_number_of_the_map_is_found_as_by_halving(signed: bool) -> None:
    numbers = torch.tensor(dynamic_map(signed), dtype=torch.float64)
    between = ((numbers[1:] + numbers[:-1]) / 2.0).float()
    near = [torch.nextafter(between, torch.full_like(between, side)) for side in (-2.0, 2.0)]
    drawn = torch.randn(20_000) * torch.exp(-20.0 * torch.rand(20_000))
    x = torch.cat([drawn, between, *near]).clamp(-1.0 if signed else 0.0, 1.0)
    x[0::MOMENT_BLOCK] = 1.0  # the largest of its block, so that every other is its own share of it
    held = empty(len(x), form=Moments.DYNAMIC8, device=CPU, wide=x.dtype)
    Packing(Moments.DYNAMIC8, signed=signed, device=CPU).pack(x, held)
    expected = torch.bucketize(x, between)
    assert torch.equal(held.codes.long(), expected if signed else torch.maximum(expected, (x > 0).long()))


def test_packed_state_may_lie_in_the_hosts_memory(pool: Pool) -> None:
    entry = of(SHARDS, state=Moments.DYNAMIC8)
    plain = pool.run(offload_cases.losses, entry, False, ranks=2)
    away = offload_cases.with_groups(entry, offload=Offload.OPTIMIZER)
    assert pool.run(offload_cases.losses, away, True, ranks=2) == plain


def rounds(layout: Layout, **changes: object) -> Design:
    return of(replace(layout, precision=Precision.BF16), master=Master.BF16_STOCHASTIC, **changes)


def test_rounding_is_to_a_neighbour_and_right_on_average() -> None:
    x = (1.0 + torch.arange(0, 256) / 2.0**15).repeat_interleave(4096)
    bits = random_bits(places(x, start=0, stop=len(x)), step=torch.tensor(7.0), key=key_of("a", seed=0))
    found = rounded(x, bits).float().view(256, 4096)
    exact = x.view(256, 4096)
    assert bool(((found == 1.0) | (found == 1.0 + 2.0**-7) | (found == 1.0 + 2.0**-6)).all())
    # Of 4096 draws a mean is off by a 64th of half a step at most once in thousands; of all, by far less.
    off = (found.mean(dim=1) - exact[:, 0]).abs() / 2.0**-7
    assert float(off.max()) < 5.0 * 0.5 / 64.0
    assert abs(float((found - exact).mean())) < 2.0**-7 * 5.0 * 0.5 / 1024.0
    assert torch.equal(rounded(exact[0], bits[:4096]), exact[0].to(torch.bfloat16))
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 3.4e38])
    assert torch.equal(rounded(-x, bits).float(), -found.view(-1))
    kept = rounded(odd, torch.full((6,), 0xFFFF, dtype=torch.int32))
    assert kept[:2].tolist() == odd[:2].tolist()
    assert bool(kept[2].isnan())


def test_bits_differ_by_place_step_name_and_seed() -> None:
    where = torch.arange(1 << 16)
    first = random_bits(where, step=torch.tensor(1.0), key=key_of("a", seed=0))
    for step, name, seed in ((2.0, "a", 0), (1.0, "b", 0), (1.0, "a", 1)):
        other = random_bits(where, step=torch.tensor(step), key=key_of(name, seed=seed))
        assert float((first == other).float().mean()) < 1e-3
        both = torch.stack([first, other]).double()
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.02
    assert abs(float(first.double().mean()) / 32767.5 - 1.0) < 0.01
    assert float(torch.corrcoef(torch.stack([first[1:], first[:-1]]).double())[0, 1]) < 0.02


@cache
def rounded_by_one() -> dict[str, numpy.ndarray]:
    found, _ = narrow_cases.laid_steps(rounds(ONE))
    return found


@pytest.mark.parametrize(
    "layout",
    [
        REPLICAS,
        SHARDS,
        GRID,
        PIPELINE,
        Layout(tensor=2, batch=BATCH),
        Layout(shard=8, sharding=Sharding.PARAMETERS, batch=8),
    ],
    ids=str,
)
def test_every_layout_rounds_alike(pool: Pool, layout: Layout) -> None:
    """The same gradients give the same bits, whichever rank holds an element."""
    wanted, seen = rounded_by_one(), set()
    for found, _ in pool.run(narrow_cases.laid_steps, rounds(layout), ranks=layout.ranks):
        for name, value in found.items():
            numpy.testing.assert_array_equal(value, wanted[name], err_msg=name)
            seen.add(name)
    assert seen == set(wanted)


def test_steps_smaller_than_bf16_tells_apart_are_made_on_average() -> None:
    """Of AdamW in full a weight near one moves by 1e-4 a step; half a step of bf16 there is 20 times that."""
    gradients = torch.ones(4096)
    spec = OptimizerSpec(learning_rate=1e-4, weight_decay=0.0, master=Master.BF16_STOCHASTIC)
    from meshwright.parallel.narrow_adamw import NarrowAdamWRule

    parameter = torch.nn.Parameter(torch.full((4096,), 1.5, dtype=torch.bfloat16))
    rule = NarrowAdamWRule(spec, keys={parameter: key_of("a", seed=0)})
    state = rule.state(parameter)
    for _ in range(100):
        parameter.grad = gradients.to(torch.bfloat16)
        rule.step([parameter], [state], rate=1e-4, weight_decay=0.0)
    assert float(parameter.detach().float().mean()) == pytest.approx(1.49, abs=1e-3)


@pytest.mark.parametrize("layout", [ONE, SHARDS, GRID], ids=str)
@pytest.mark.parametrize("form", [Moments.FP32, Moments.DYNAMIC8])
def test_parameters_in_bf16_take_what_the_cost_model_counts(pool: Pool, layout: Layout, form: Moments) -> None:
    entry = with_speed(rounds(layout, state=form), Precision.BF16)
    told = predict(entry).memory[0].parts
    for _, kept in pool.run(narrow_cases.laid_steps, entry, ranks=layout.ranks):
        assert kept["optimizer"] == told[MemoryPart.OPTIMIZER]
        if layout is not GRID:  # there whole parameters stay beside shards of them until the next step
            assert kept["parameters"] == told[MemoryPart.PARAMETERS]
    usual = with_speed(optimizer_cases.with_optimizer(entry, of(layout).job.optimizer), Precision.BF16)
    assert told[MemoryPart.GRADIENTS] < predict(usual).memory[0].parts[MemoryPart.GRADIENTS]


def test_training_in_bf16_alone_stays_near(pool: Pool) -> None:
    usual = of(replace(ONE, precision=Precision.BF16))
    exact = layout_cases.losses(usual, 8)
    for layout in (ONE, SHARDS):
        found = pool.run(layout_cases.losses, rounds(layout), 8, ranks=layout.ranks)[0]
        assert found == pytest.approx(exact, abs=0.1)
        assert found != exact


def test_what_is_not_kept_in_bf16_is_refused_by_name() -> None:
    rule = next(rule for rule in RUNTIME_RULES if rule.name == "runtime-master")
    entry = rounds(ONE)
    assert rule(entry) is None
    assert rule(of(ONE)) is None
    groups = (ParameterGroup(names=("head.*",), kind=OptimizerKind.SGD),)
    refused = (
        of(ONE, master=Master.BF16_STOCHASTIC),
        rounds(ONE, groups=groups),
        offload_cases.with_groups(entry, offload=Offload.OPTIMIZER),
        replace(entry, plan=replace(entry.plan, gradients=GradientSync(precision=Precision.FP8))),
    )
    assert all(rule(each) is not None for each in refused)
    assert ("offload", "optimizer") in untrained(entry.job)
