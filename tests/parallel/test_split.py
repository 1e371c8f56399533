"""A split backward: inputs' gradients first, matrices' later, and nothing else of the pass between them."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from meshwright.nn import experts
from meshwright.nn.decoder import DecoderLayer
from meshwright.parallel.compile import uncompiled
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.split import WeightGradients
from meshwright.search.runtime_rules import compile_fits
from meshwright.spec.job import Switch
from meshwright.spec.plan import Recompute, ScheduleKind
from meshwright.train.compile_trial import LayerCompiler
from tests.parallel.split_cases import decoder, sent_in_time, units
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool

TOKENS = torch.arange(24).view(2, 12) % models.VOCAB


class NeverCompiled:
    """What is laid under a plan that cannot be compiled."""

    def compile(self) -> None:
        raise AssertionError("compiled")

    def uncompile(self) -> None:
        raise AssertionError("never was compiled")


def gradients(part: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in part.named_parameters()}


@pytest.mark.parametrize("recompute", list(Recompute))
def test_both_halves_are_the_whole_backward(recompute: Recompute) -> None:
    """The first half gives all but the matrices' gradients, and a layer is computed again once, not twice."""
    plain, part = decoder(), decoder()
    plain(TOKENS).square().sum().backward()
    weights, runs = WeightGradients(units(part)), Counter[str]()
    for name, layer in part.layers.items():
        apply_recompute(layer, recompute)
        layer.transform.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    weights.before_forward(splits=True)
    output = part(TOKENS)
    with weights.putting_off(7):
        output.square().sum().backward()
    early = {name for name, value in gradients(part).items() if value is not None}
    assert early == {name for name in gradients(part) if "norm" in name or name.startswith("embedding.")}
    done: list[nn.Module] = []
    weights.form(7, done=done.append)
    assert done == units(part)[::-1]
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(gradients(part)[name], expected, rtol=0, atol=1e-12)
    assert set(runs.values()) == {2 if recompute is Recompute.FULL else 1}


def test_experts_are_formed_as_one_gradient_of_their_stack() -> None:
    layer = models.all_models()["mixture_full"].layers[0]
    plain, part = decoder(layer=layer), decoder(layer=layer)
    plain(TOKENS).square().sum().backward()
    weights, calls = WeightGradients(units(part)), Counter[str]()
    for name, parameter in part.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    weights.before_forward(splits=True)
    with weights.putting_off(0):
        part(TOKENS).square().sum().backward()
    weights.form(0, done=lambda _: None)
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(gradients(part)[name], expected, rtol=0, atol=1e-12)
    assert {name for name, count in calls.items() if "experts" in name and count != 1} == set()


@pytest.mark.parametrize("splits", [True, False])
def test_products_of_all_experts_in_one_kernel_are_put_off_too(monkeypatch: pytest.MonkeyPatch, splits: bool) -> None:
    layer = models.all_models()["mixture"].layers[0]
    plain, part = decoder(layer=layer).float(), decoder(layer=layer).float()
    plain(TOKENS).square().sum().backward()
    monkeypatch.setattr(experts, "suits_grouped", lambda *_: True)
    weights = WeightGradients(units(part))
    weights.before_forward(splits=splits)
    output = part(TOKENS)
    with weights.putting_off(0) if splits else nullcontext():
        output.square().sum().backward()
    early = [name for name, value in gradients(part).items() if "experts" in name and value is not None]
    assert bool(early) is not splits
    if splits:
        weights.form(0, done=lambda _: None)
    for name, expected in gradients(plain).items():
        assert expected is not None
        bound = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(gradients(part)[name], expected, rtol=0, atol=bound)


def test_a_pass_whose_backward_is_whole_puts_nothing_off() -> None:
    plain, part = decoder(), decoder()
    plain(TOKENS).square().sum().backward()
    weights = WeightGradients(units(part))
    weights.before_forward(splits=False)
    part(TOKENS).square().sum().backward()
    for name, expected in gradients(plain).items():
        assert torch.equal(gradients(part)[name], expected)


def test_between_the_halves_a_matrix_keeps_its_input_and_output_gradient_alone() -> None:
    """The softmax of attention, which no matrix reads, is gone after the first half; what a matrix read is not."""
    part = decoder()
    weights, kept = WeightGradients(units(part)), {}
    layer = part.layers["0"]
    assert isinstance(layer, DecoderLayer)
    for name, module in (("mixer", layer.mixer), ("core", layer.mixer.core), ("norm", layer.mixer_norm)):
        module.register_forward_hook(lambda _m, _a, out, name=name: kept.update({name: weakref.ref(out)}))
    weights.before_forward(splits=True)
    with weights.putting_off(0):
        part(TOKENS).square().sum().backward()
    storages = {entry.x.untyped_storage().data_ptr() for each in weights._passes for entry in each.get(0, [])}
    assert {name for name, held in kept.items() if held() is not None} <= {"norm", "core"}
    assert len(storages) == 1 + 4 * 4  # the head's input; in a layer: normed, attended, normed, hidden
    weights.form(0, done=lambda _: None)
    assert all(not each for each in weights._passes)


def test_buckets_are_on_their_way_before_the_last_half_ends(pool: Pool) -> None:
    for sent, count, errors in pool.run(sent_in_time, ranks=2):
        assert sent == count > 2
        assert max(errors) < 1e-10


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_V, chunks=2), "zb-v splits backwards"),
        (
            Layout(pipeline=2, kind=ScheduleKind.SEQUENCE_1F1B, slices=2),
            "seq1f1b passes keys and values between slices",
        ),
        (Layout(pipeline=2), ""),
        (Layout(kind=ScheduleKind.BREADTH_FIRST, chunks=2), ""),
    ],
    ids=lambda value: str(value),
)
def test_what_is_refused_to_compile_is_not_tried_either(layout: Layout, why: str) -> None:
    of = design(models.model(), layout)
    assert uncompiled(of.plan).startswith(why)
    if why:
        assert LayerCompiler(laid=NeverCompiled(), refusal=why).compile() == why
    assert bool(uncompiled(of.plan)) == bool(why)
    compiled = replace(of, job=replace(of.job, compile=Switch.ON))
    assert bool(compile_fits(compiled)) == bool(why)
