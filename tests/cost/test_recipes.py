"""What recipes of newer devices do: eight and four bits, heads of few features, biases of experts, tokens sent once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.catalog.devices import devices
from meshwright.cost.compute import part_seconds
from meshwright.cost.expert_handling import ExpertHandling
from meshwright.cost.met import Routed, met
from meshwright.cost.mixture_work import MIXTURE
from meshwright.cost.operators import ATTENTION, HEAD, block_work
from meshwright.cost.rates import quantize_bytes, rates
from meshwright.cost.software import Software
from meshwright.cost.stacks import SOFTWARE
from meshwright.cost.table import PRECISIONS
from meshwright.cost.work import LossKernel, PartWork, Sizes
from meshwright.spec.cluster import Precision
from meshwright.spec.model import Attention, Head, Layer, Mixture, Norm

WIDTH = 4096
NORM = Norm(width=WIDTH)
CORE = SOFTWARE["megatron-core"]


def sizes(**settings: Any) -> Sizes:
    one = np.ones(1)
    return Sizes(**{"batch": one, "sequence": 4096.0, "tensor": one, "split": one, "itemsize": 2.0 * one} | settings)


def timed(block: Layer | Head, name: str, *, device: str, precision: Precision, software: Software = CORE) -> tuple:
    part = next(part for part in block_work(block, sizes()) if part.name == name)
    found = rates(devices()[device], precision=np.array([PRECISIONS.index(precision)]), length=4096, software=software)
    return part, part_seconds(part, device=devices()[device], rates=found, software=software)


def attending(head_dim: int, heads: int = 32) -> Layer:
    mixer = Attention(width=WIDTH, heads=heads, kv_heads=heads, head_dim=head_dim, norm=NORM)
    return Layer(mixer=mixer, transform=None)


def mixed(**settings: object) -> PartWork:
    part = Mixture(width=WIDTH, hidden=1024, experts=64, top_k=8, norm=NORM, expert_bias=bool(settings.pop("bias", 0)))
    layer = Layer(mixer=None, transform=part)
    experts = sizes(expert=8.0 * np.ones(1), expert_tensor=np.ones(1), **settings)
    return next(part for part in block_work(layer, experts) if part.name == MIXTURE)


@pytest.mark.parametrize("device", ["H100", "GB200", "GB300"])
@pytest.mark.parametrize("precision", [Precision.FP8, Precision.NVFP4])
def test_a_head_in_bf16_takes_as_long_whatever_the_layers_are_in(device, precision):
    """Four bits sustain 0.39 of their peak on GB300 and bf16 0.67: the head's share is that of its own precision."""
    if precision not in devices()[device].peak_flops:
        pytest.skip("no such products")
    head = Head(width=WIDTH, vocab=128256, norm=NORM, tied=False)
    narrow, plain = (timed(head, HEAD, device=device, precision=each)[1] for each in (precision, Precision.BF16))
    assert narrow.forward == pytest.approx(plain.forward)
    assert narrow.backward == pytest.approx(plain.backward)


def test_an_input_that_several_matrices_meet_is_quantised_once():
    """Query, key and value are one matrix in Megatron, and so are gate and up; eager modules cast for each."""
    layer = attending(128)
    eager = replace(CORE, eager=True)
    fused, apart = (
        timed(layer, ATTENTION, device="B200", precision=Precision.MXFP8, software=stack) for stack in (CORE, eager)
    )
    more = apart[1].forward - fused[1].forward
    device = devices()["B200"]
    twice = 2.0 * 4096 * WIDTH * quantize_bytes(Precision.MXFP8)[0]
    assert float(more[0]) == pytest.approx(twice / (device.memory_bandwidth * device.memory_fraction), rel=1e-6)
    inputs = sum(float(np.ravel(product.inputs)[0]) for product in fused[0].products)
    assert inputs == 2.0  # what attention reads, and what its output projection does


def test_an_early_loss_reads_logits_twice_and_writes_their_gradient_with_it():
    head = Head(width=WIDTH, vocab=1000, norm=NORM, tied=False)
    part = next(p for p in block_work(head, sizes(loss_kernel=LossKernel(early=True))) if p.name == HEAD)
    logits = 4096.0 * 1000
    assert float(part.traffic[0]) / logits == 3 * 2.0
    assert float(part.backward_traffic[0]) / logits == 2 * 2.0


@pytest.mark.parametrize(("device", "share"), [("B200", 0.65), ("H100", 0.83), ("A100-80GB", 1.0)])
def test_heads_of_64_features_reach_less_where_that_was_measured(device, share):
    """Causal prefill in three engines' tables; the same FLOPs by twice as many heads."""
    wide, narrow = (
        timed(attending(dim, heads), ATTENTION, device=device, precision=Precision.BF16)[1].core
        for dim, heads in ((128, 256), (64, 512))
    )
    most = float((wide / narrow)[0])
    assert most == pytest.approx(share, rel=0.06)


@pytest.mark.parametrize(("plain", "ultra"), [("B200", "B300"), ("GB200", "GB300")])
def test_blackwell_ultra_is_quicker_in_attention_by_its_exponentials(plain, ultra):
    found = [timed(attending(128, 512), ATTENTION, device=name, precision=Precision.BF16)[1] for name in (plain, ultra)]
    assert float((found[0].core / found[1].core)[0]) == pytest.approx(1.25)
    saved = [float((found[0].core - found[1].core)[0]), float((found[0].core_backward - found[1].core_backward)[0])]
    assert saved[1] == pytest.approx(saved[0], rel=0.03)  # as many exponentials
    assert devices()[ultra].attention_kernels != devices()[plain].attention_kernels


def test_ranks_that_hold_an_expert_of_a_token_as_draws_show():
    generator = np.random.default_rng(0)
    drawn = np.mean([len(set(generator.integers(0, 8, size=8))) for _ in range(20_000)])
    assert float(met(np.array([8.0]), Routed(8.0, 1.0, 1.0))[0]) * 8 == pytest.approx(drawn, rel=0.01)
    # Four of eight groups: of 32 ranks 16 may hold one.
    among = 16 * (1 - (15 / 16) ** 8)
    assert float(met(np.array([32.0]), Routed(8.0, 8.0, 4.0))[0]) * 8 == pytest.approx(among)
    assert float(met(np.ones(1), Routed(8.0, 1.0, 1.0))[0]) == 1 / 8


def test_tokens_that_cross_once_are_laid_out_by_expert_where_they_arrive():
    """Rows of width w moved for every row of an expert: 8, and 2 + 2 * 0.656 where a token crosses once to a rank."""
    rows = 4096 * 8 * WIDTH * 2.0
    saved = float((mixed().traffic - mixed(experts=ExpertHandling(dispatches_once=True)).traffic)[0]) / rows
    once = 1 - (7 / 8) ** 8
    assert saved == pytest.approx(8.0 - (2.0 + 2.0 * once))


def test_biases_of_experts_are_added_one_by_one_in_fp32():
    """28 bytes an element forward: scaled (4), added (2 + 4 + 4), joined (4 + 4) and narrowed (4 + 2); 36 backward."""
    elements = 4096 * 8 * WIDTH
    biased = ExpertHandling(biases_apart=True)
    plain, apart = mixed(bias=True), mixed(bias=True, experts=biased)
    assert float((apart.traffic - plain.traffic)[0]) == 28.0 * elements
    assert float((apart.backward_traffic - plain.backward_traffic)[0]) == 36.0 * elements
    assert float((apart.kernels - plain.kernels)[0]) == 2 * 8  # experts of a rank
    assert mixed(experts=biased).traffic == mixed().traffic
