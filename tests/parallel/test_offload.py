"""State and activations in the host's memory: the same numbers, and less on the device."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.nn.decoder import DecoderLayer
from meshwright.parallel import apply, build_mesh, build_optimizer, lay, offload, optimizer
from meshwright.parallel.offload import AwayRule, Copies
from meshwright.search.runtime_rules import RUNTIME_RULES, untrained
from meshwright.spec.job import JobSpec, Switch
from meshwright.spec.optimizer import Adafactor, Moments, Muon, OptimizerSpec, Sgd
from meshwright.spec.plan import Design, Offload, Recompute, Sharding
from tests.parallel import move_cases, offload_cases
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool
from tests.support.sampled import sampled

TINY = models.model()
LAYOUTS = (
    Layout(batch=4),
    Layout(batch=4, recompute=Recompute.FULL),
    Layout(shard=2, sharding=Sharding.PARAMETERS, batch=4, recompute=Recompute.SELECTIVE),
    Layout(pipeline=2, tensor=2, sequence_parallel=True, batch=4),
)


SHARDED = (
    Layout(shard=2, sharding=Sharding.PARAMETERS, batch=4),
    Layout(shard=2, tensor=2, sharding=Sharding.PARAMETERS, sequence_parallel=True, batch=4),
    Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS, batch=4, recompute=Recompute.FULL),
    Layout(pipeline=2, shard=2, sharding=Sharding.PARAMETERS, batch=4),
)


def away(entry: Design, kind: Offload) -> Design:
    return offload_cases.with_groups(entry, offload=kind)


@pytest.mark.parametrize("layout", sampled(LAYOUTS, quick=2), ids=str)
@pytest.mark.parametrize("kind", [Offload.OPTIMIZER, Offload.ACTIVATIONS])
def test_what_lies_in_the_hosts_memory_changes_no_bit(pool: Pool, kind: Offload, layout: Layout) -> None:
    """Copied there and back, which a processor does not need and does here."""
    entry = design(TINY, layout)
    plain = pool.run(offload_cases.losses, entry, False, ranks=layout.ranks)
    assert pool.run(offload_cases.losses, away(entry, kind), True, ranks=layout.ranks) == plain


@pytest.mark.parametrize("layout", sampled(SHARDED, quick=2), ids=str)
def test_parameters_come_from_the_hosts_memory_and_change_no_number(pool: Pool, layout: Layout) -> None:
    entry = design(TINY, layout)
    plain = pool.run(offload_cases.losses, entry, False, ranks=layout.ranks)
    found = pool.run(offload_cases.losses, away(entry, Offload.PARAMETERS), False, ranks=layout.ranks)
    for mine, wanted in zip(found, plain, strict=True):
        assert mine == pytest.approx(wanted, abs=1e-12)


def test_every_shard_and_nothing_else_is_fsdps_to_bring(pool: Pool) -> None:
    entry = design(TINY, SHARDED[0])
    for offloads, wanted in ((Offload.NONE, {False}), (Offload.PARAMETERS, {True})):
        for found in pool.run(offload_cases.shards_away, away(entry, offloads), ranks=2):
            assert found == wanted


@pytest.mark.parametrize("spec", [OptimizerSpec(learning_rate=1e-2), OptimizerSpec(state=Moments.DYNAMIC8)])
def test_a_run_goes_on_with_its_parameters_away(pool: Pool, tmp_path: Path, spec: OptimizerSpec) -> None:
    source = design(TINY, Layout(replicate=2, batch=8), optimizer=spec)
    target = away(
        design(TINY, Layout(shard=2, sharding=Sharding.PARAMETERS, batch=8), optimizer=spec), Offload.PARAMETERS
    )
    losses = pool.run(move_cases.train, source, str(tmp_path), 2, 2, ranks=2)[0]
    for rank, _ in pool.run(move_cases.go_on, target, str(tmp_path), 2, 2, ranks=2):
        assert rank == pytest.approx(losses[2:], abs=1e-9 if spec.state is Moments.FP32 else 1e-2)


def test_a_run_is_loaded_into_masters_too(pool: Pool, tmp_path: Path) -> None:
    """Another plan's state comes in through the parameters; masters in the host's memory follow."""
    source = design(TINY, Layout(batch=8))
    target = away(design(TINY, Layout(shard=2, sharding=Sharding.PARAMETERS, batch=8)), Offload.OPTIMIZER)
    losses = pool.run(move_cases.train, source, str(tmp_path), 2, 2, ranks=1)[0]
    found = pool.run(offload_cases.go_on, target, str(tmp_path), 2, 2, ranks=2)
    for rank in found:
        assert rank == pytest.approx(losses[2:], abs=1e-9)


def test_nothing_that_a_layer_saves_but_its_weights_stays() -> None:
    entry = away(design(TINY, Layout(batch=2, microbatch=2)), Offload.ACTIVATIONS)
    held = []

    def count(x: Tensor) -> Tensor:
        held.append(x.untyped_storage().data_ptr())
        return x

    with mock.patch.object(apply, "Copies", lambda device: Copies(device, always=True)), _all_sizes():
        laid = lay(entry, build_mesh(entry.plan, device_type="cpu"), device="cpu", seed=0)
        weights = {p.untyped_storage().data_ptr() for _, p in laid.named_parameters()}
        layer = next(m for m in laid.parts[0].modules() if isinstance(m, DecoderLayer))
        packed = []
        with mock.patch.object(offload.Passage, "pack", _counting(packed)), saved_tensors_hooks(count, lambda x: x):
            laid.step(*offload_cases.tokens(entry))
    assert layer.around is not None
    assert len(packed) > 8 * len(TINY.layers)
    assert not weights & set(packed)
    assert set(held) & weights, "embedding and head keep theirs where they are"


def test_what_several_operators_save_goes_once() -> None:
    passage = offload.Passage(Copies(torch.device("cpu"), always=True), None)
    x = torch.arange(6.0)
    first, again, part = passage.pack(x), passage.pack(x), passage.pack(x[2:])
    assert first == again
    assert part != first
    x.add_(1.0)
    assert passage.pack(x) not in (first, part)
    torch.testing.assert_close(passage.unpack(first), torch.arange(6.0))
    torch.testing.assert_close(passage.unpack(part), torch.arange(2.0, 6.0))


def test_the_last_layers_activations_come_back_while_later_ones_are_used() -> None:
    copies = Copies(torch.device("cpu"), always=True)
    before = offload.Passage(copies, None)
    after = offload.Passage(copies, before)
    one, two = before.pack(torch.ones(3)), after.pack(torch.zeros(3))
    after.unpack(two)
    with mock.patch.object(copies, "to_device", side_effect=AssertionError("it was fetched before")):
        torch.testing.assert_close(before.unpack(one), torch.ones(3))


def test_a_host_is_held_to_the_pace_of_its_copies() -> None:
    """Forward begins no layer, and backward fetches none, while what went before still takes the device's memory."""
    said: list[str] = []

    class Paced(Copies):
        def pace(self) -> None:
            said.append("pace")

        def settle(self) -> None:
            said.append("settle")

        def to_device(self, x: Tensor) -> Tensor:
            said.append("fetch")
            return super().to_device(x)

    entry = away(design(TINY, Layout(batch=2, microbatch=2)), Offload.ACTIVATIONS)
    with mock.patch.object(apply, "Copies", lambda device: Paced(device, always=True)), _all_sizes():
        laid = lay(entry, build_mesh(entry.plan, device_type="cpu"), device="cpu", seed=0)
        laid.step(*offload_cases.tokens(entry))
    layers = len(TINY.layers)
    assert [name for name, _ in groupby(said)] == ["pace", "fetch"] + ["settle", "fetch"] * (layers - 1)
    assert said.count("pace") == layers
    assert said.count("settle") == layers - 1


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_layer_begins_when_copies_of_the_layer_before_the_last_are_there(layers: int) -> None:
    said: list[str] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            said.append(f"{self.number} is there")

    class Out:
        begun = 0

        def record_event(self) -> Event:
            said.append(f"begin {self.begun}")
            self.begun += 1
            return Event(self.begun - 2)  # of the layer before this one

    copies = Copies(torch.device("cpu"), always=True)
    copies._out = Out()
    for _ in range(layers):
        copies.pace()
    expected = [["begin 0"], *([f"begin {layer}", f"{layer - 2} is there"] for layer in range(1, layers))]
    assert said == [word for words in expected for word in words]


def test_masters_are_copied_once() -> None:
    entry = away(design(TINY, Layout(batch=4)), Offload.OPTIMIZER)
    with ExitStack() as stack:
        offload_cases.copying(stack)
        run = move_cases.runner(entry)
        run.step(0)
        rules = [group["rule"] for group in run.optimizer.param_groups]
        before = {id(master) for rule in rules for master, _ in rule._masters.values()}
        run.step(1)
        assert {id(master) for rule in rules for master, _ in rule._masters.values()} == before


def test_blocks_may_differ_in_whose_state_is_away() -> None:
    entry = design(TINY, Layout(batch=4))
    (group,) = entry.plan.stages[0].groups
    halves = (
        replace(group, stop=3, offload=Offload.OPTIMIZER),
        replace(group, start=3),
    )
    stages = (replace(entry.plan.stages[0], groups=halves),)
    entry = replace(entry, plan=replace(entry.plan, stages=stages))
    laid = lay(entry, build_mesh(entry.plan, device_type="cpu"), device="cpu", seed=0)
    with mock.patch.object(optimizer, "Copies", lambda device: Copies(device, always=True)):
        built = build_optimizer(laid, entry.job.optimizer)
    found = {id(p): isinstance(group["rule"], AwayRule) for group in built.param_groups for p in group["params"]}
    for name, parameter in laid.named_parameters():
        assert found[id(parameter)] == name.startswith(("embedding.", "layers.0.", "layers.1.")), name


def test_what_hosts_cannot_do_is_refused_by_name() -> None:
    rule = next(rule for rule in RUNTIME_RULES if rule.name == "runtime-offload")
    entry = design(TINY, Layout())
    for kind in Offload:
        assert rule(away(entry, kind)) is None
    for spec in (OptimizerSpec(), Sgd(), Muon(), Adafactor()):
        asked = replace(entry, job=replace(entry.job, optimizer=spec))
        broken = rule(away(asked, Offload.OPTIMIZER))
        assert (rule(away(asked, Offload.PARAMETERS)) is None) == (broken is None)
        assert (broken is None) == isinstance(spec, (OptimizerSpec, Sgd))
        assert (("offload", "optimizer") in untrained(asked.job)) == (broken is not None)
        assert rule(away(asked, Offload.ACTIVATIONS)) is None
    compiled = replace(entry, job=replace(entry.job, compile=Switch.ON))
    assert rule(away(compiled, Offload.ACTIVATIONS)) is not None
    assert ("offload", "activations") in untrained(compiled.job)
    assert not {name for name, _ in untrained(JobSpec())} & {"offload"}


def _all_sizes() -> mock._patch[int]:
    return mock.patch.object(offload, "_LEAST_BYTES", 0)


def _counting(packed: list[int]) -> object:
    real = offload.Passage.pack

    def pack(self: offload.Passage, x: Tensor) -> int:
        packed.append(x.untyped_storage().data_ptr())
        return real(self, x)

    return pack
