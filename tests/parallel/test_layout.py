"""Parts of the room alone: first weights, evaluation, spans, clipping, precision, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch

from meshwright.nn import Decoder, initialize
from meshwright.parallel import build_mesh, build_optimizer, lay, unfit
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError, EnvironmentUnfit
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Recompute, ScheduleKind, Sharding
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import GradientSync
from tests.parallel import layout_cases
from tests.parallel.parity_cases import SEED
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool
from tests.support.sampled import sampled

TINY = models.model()
CUBE = Layout(pipeline=2, shard=2, tensor=2, sharding=Sharding.PARAMETERS, sequence_parallel=True, batch=8)
SHARDINGS = (Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS)


def test_first_weights_are_bit_equal_in_a_layout_of_every_axis(pool: Pool) -> None:
    decoder = Decoder(TINY).double()
    initialize(decoder, seed=SEED)
    whole = {name: parameter.detach().numpy() for name, parameter in decoder.named_parameters()}
    seen = set()
    for rank in pool.run(layout_cases.first_weights, design(TINY, CUBE), ranks=8):
        for name, value in rank.items():
            numpy.testing.assert_array_equal(value, whole[name])
            seen.add(name)
    assert seen == set(whole)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_an_evaluation_between_steps_changes_nothing(pool: Pool, sharding: Sharding) -> None:
    layout = Layout(shard=2, sharding=sharding, batch=4)
    for evaluating, plain in pool.run(layout_cases.evaluations_between_steps, design(TINY, layout), ranks=2):
        assert evaluating == plain
        assert plain[2] < plain[0]


@pytest.mark.parametrize("sharding", sampled([Sharding.NONE, *SHARDINGS], quick=2))
def test_bf16_stays_near_full_precision_in_every_sharding(pool: Pool, sharding: Sharding) -> None:
    degrees = {"replicate": 2} if sharding is Sharding.NONE else {"shard": 2}
    layout = Layout(sharding=sharding, batch=4, **degrees)
    exact = pool.run(layout_cases.losses, design(TINY, layout), 8, ranks=2)[0]
    found = pool.run(layout_cases.losses, design(TINY, replace(layout, precision=Precision.BF16)), 8, ranks=2)[0]
    assert found == pytest.approx(exact, abs=0.05)
    assert found != exact


def test_gradients_summed_in_bf16_stay_near(pool: Pool) -> None:
    entry = design(TINY, Layout(replicate=2, batch=4, precision=Precision.FP32))
    narrow = replace(entry, plan=replace(entry.plan, gradients=GradientSync(precision=Precision.BF16)))
    exact = pool.run(layout_cases.losses, entry, 6, ranks=2)[0]
    found = pool.run(layout_cases.losses, narrow, 6, ranks=2)[0]
    assert found == pytest.approx(exact, abs=0.02)
    assert found != exact


def test_clipping_is_to_the_norm_of_the_whole_model(pool: Pool) -> None:
    results = pool.run(layout_cases.clipped, design(TINY, CUBE), 0.25, ranks=8)
    assert len(set(results)) == 1
    before, after, larger = results[0]
    assert before > 1.0
    assert after == pytest.approx(0.25, abs=1e-12)
    assert larger == pytest.approx(0.25, abs=1e-12)


def test_every_pass_of_every_microbatch_is_recorded(pool: Pool) -> None:
    layout = Layout(pipeline=2, kind=ScheduleKind.INTERLEAVED, chunks=2, batch=4)
    for rank, kept in enumerate(pool.run(layout_cases.spans, design(TINY, layout), ranks=2)):
        for name in (LineName.FORWARD, LineName.BACKWARD):
            passes = {(stage, microbatch) for what, stage, microbatch in kept if what == name}
            assert passes == {(stage, microbatch) for stage in (rank, rank + 2) for microbatch in range(4)}
        assert LineName.GRADIENTS in {what for what, _, _ in kept}


def test_a_plan_for_more_devices_than_processes_is_refused() -> None:
    with pytest.raises(EnvironmentUnfit, match="2 devices and 1 process runs"):
        build_mesh(design(TINY, Layout(shard=2)).plan, device_type="cpu")


def test_one_device_has_no_wrapper_at_all() -> None:
    entry = design(TINY, Layout(precision=Precision.FP32))
    laid = lay(entry, build_mesh(entry.plan, device_type="cpu"), device="cpu", seed=0)
    assert [type(part) for part in laid.parts] == [Decoder]
    for module in laid.parts[0].modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert getattr(module, "reader", None) is None
    assert all(type(parameter) is torch.nn.Parameter for _, parameter in laid.named_parameters())


def test_what_cannot_run_is_said_all_at_once() -> None:
    layout = Layout(tensor=3, sequence_parallel=True)
    text = "\n".join(str(problem) for problem in unfit(design(TINY, layout)))
    for part in ("sequence length 16", "key-value heads of 2", "hidden features of 64"):
        assert part in text


def test_a_precision_without_runtime_is_refused() -> None:
    entry = design(TINY, Layout(precision=Precision.INT8))
    with pytest.raises(ConfigError, match="int8 has no runtime"):
        lay(entry, build_mesh(entry.plan, device_type="cpu"), device="cpu", seed=0)


def test_matrices_decay_and_nothing_else_does() -> None:
    entry = design(models.gpt(), Layout(precision=Precision.FP32))
    laid = lay(entry, build_mesh(entry.plan, device_type="cpu"), device="cpu", seed=0)
    optimizer = build_optimizer(laid, OptimizerSpec(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in laid.named_parameters():
        matrix = name.endswith(("query.weight", "key.weight", "value.weight", "output.weight", "up.weight"))
        matrix = matrix or name.endswith("down.weight")
        assert decay[id(parameter)] == (0.3 if matrix else 0.0), name


def test_recompute_keeps_less_for_backward() -> None:
    kept = {}
    for recompute in Recompute:
        entry = design(TINY, Layout(batch=1, recompute=recompute, precision=Precision.FP32))
        laid = lay(entry, build_mesh(entry.plan, device_type="cpu"), device="cpu", seed=0)
        sizes: dict[int, int] = {}

        def pack(x: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            laid.parts[0](torch.zeros(1, 16, dtype=torch.int64))
        kept[recompute] = sum(sizes.values())
    assert kept[Recompute.FULL] < kept[Recompute.SELECTIVE] < kept[Recompute.NONE]
