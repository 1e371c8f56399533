"""Products cut into tiles and waves, attention into blocks, and kernels that others measured."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.catalog.devices import devices
from meshwright.catalog.nodes import nodes
from meshwright.cost.compute import part_seconds
from meshwright.cost.mixture_work import MIXTURE
from meshwright.cost.operators import ATTENTION, HEAD, block_work
from meshwright.cost.products import product_seconds
from meshwright.cost.rates import quantize_bytes, rates
from meshwright.cost.recurrence_work import RECURRENCE
from meshwright.cost.stacks import SOFTWARE
from meshwright.cost.table import PRECISIONS
from meshwright.cost.work import Sizes
from meshwright.search import RULES, Scope
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.model import Attention, Head, Layer, Mixture, Norm, Recurrence, score_flops_per_token
from tests.support.designs import Layout, design
from tests.support.models import model

STACK = SOFTWARE["megatron-core"]
TILED = sorted(name for name, device in devices().items() if device.tiles)


def figures(name, *, precision=Precision.BF16, length=4096, software=STACK):
    device = devices()[name]
    if precision not in device.peak_flops:
        precision = Precision.FP16
    return rates(device, precision=np.array([PRECISIONS.index(precision)]), length=length, software=software)


def seconds(name, m, n, k, **settings):
    sizes = (np.array([float(size)]) for size in (m, n, k))
    return float(product_seconds(*sizes, figures(name).products, **settings)[0])


def sizes(*, batch=1, sequence=4096, tensor=1.0):
    ones = np.ones(1)
    return Sizes(batch=batch * ones, sequence=float(sequence), tensor=tensor * ones, split=ones, itemsize=2.0 * ones)


def layer_seconds(layer, name, *, device="H100", software=STACK, **settings):
    shape = sizes(**settings)
    part = next(part for part in block_work(layer, shape) if part.name == name)
    found = figures(device, length=int(shape.sequence), software=software)
    return part, part_seconds(part, device=devices()[device], rates=found, software=software)


def attention(**settings):
    shape = {"width": 4096, "heads": 32, "kv_heads": 32, "head_dim": 128, "norm": Norm(width=4096)} | settings
    return Layer(mixer=Attention(**shape), transform=None)


DIMS = st.integers(min_value=1, max_value=20000)


@given(name=st.sampled_from(TILED), m=DIMS, n=DIMS, k=DIMS, more=st.integers(0, 500), dim=st.integers(0, 2))
def test_larger_products_never_take_less_and_none_beats_its_curve(name, m, n, k, more, dim):
    shape = [m, n, k]
    grown = [size + (more if index == dim else 0) for index, size in enumerate(shape)]
    first = seconds(name, *shape)
    assert first <= seconds(name, *grown) * (1 + 1e-12)
    assert 2.0 * m * n * k / first <= float(figures(name).products.achieved[0]) * (1 + 1e-9)


def test_a_wave_that_is_hardly_begun_costs_more_than_its_share():
    """On 108 units, 108 tiles of 128 by 256 are one wave; a row of tiles more is a ninth more work."""
    tiles = replace(devices()["A100-80GB"].tiles, sizes=((128, 256),))
    found = replace(figures("A100-80GB").products, tiles=tiles)

    def at(rows):
        return float(product_seconds(np.array([128.0 * rows]), np.array([3072.0]), np.array([4096.0]), found)[0])

    assert at(10) / at(9) > 1.2 * 10 / 9
    whole = replace(found, tiles=replace(tiles, tail=0.0))
    split = float(product_seconds(np.array([1280.0]), np.array([3072.0]), np.array([4096.0]), whole)[0])
    assert split / at(9) == pytest.approx(10 / 9)


@pytest.mark.parametrize(("columns", "share"), [(50304, 1.0), (50260, 0.63), (50258, 0.4), (50257, 0.25)])
def test_rows_that_are_no_whole_16_bytes_are_loaded_by_narrower_instructions(columns, share):
    """Of rows of 4, 2 and 1 elements' multiple; what reads none of them is as fast as ever."""
    rows = (np.array([float(columns)]),)
    took, apart = seconds("A100-80GB", 8192, 1024, columns, rows=rows), seconds("A100-80GB", 8192, 1024, columns)
    assert apart / took == pytest.approx(share)
    assert seconds("TPU-v4", 8192, 1024, columns, rows=rows) == seconds("TPU-v4", 8192, 1024, columns)


def test_gradients_of_an_odd_vocabulary_are_slow_and_its_logits_are_not():
    """GPT-2's 50,257 columns on A100; vTrain's tables have a head of them at a third of the rate of a full one."""
    shape = sizes(batch=8, sequence=1024)
    odd, full = (
        part_seconds(
            next(
                part
                for part in block_work(Head(vocab=vocab, width=2048, norm=Norm(width=2048)), shape)
                if part.name == HEAD
            ),
            device=devices()["A100-80GB"],
            rates=figures("A100-80GB", length=1024),
            software=STACK,
        )
        for vocab in (50257, 50304)
    )
    assert odd.forward[0] == pytest.approx(full.forward[0], rel=0.01)
    assert 2.5 < odd.backward[0] / full.backward[0] < 4.0


def test_dims_are_padded_to_the_sides_of_a_systolic_unit():
    big = 16384
    assert seconds("TPU-v4", big, big, 8070) == pytest.approx(seconds("TPU-v4", big, big, 8192))
    assert seconds("TPU-v6e", big, 7950, big) == pytest.approx(seconds("TPU-v6e", big, 8192, big))
    assert seconds("TPU-v4", big, 7950, big) < seconds("TPU-v4", big, 8192, big)


def test_a_gradient_that_is_added_to_is_read_and_written():
    layer = attention()
    _, fused = layer_seconds(layer, ATTENTION, sequence=1024)
    _, apart = layer_seconds(layer, ATTENTION, sequence=1024, software=replace(STACK, fused_accumulation=False))
    assert apart.backward < fused.backward
    assert apart.forward == fused.forward


def test_few_heads_and_narrow_windows_leave_attention_units_idle():
    def rate(**settings):
        part, found = layer_seconds(attention(**settings), ATTENTION, sequence=settings.pop("sequence", 4096))
        return float(part.score_flops[0] / found.core[0])

    assert rate(width=256, heads=2, kv_heads=2) < 0.5 * rate()
    assert rate(window=128) < 0.6 * rate() < rate(window=2048) < rate()


def test_attention_that_is_not_causal_scores_twice_and_is_not_trained():
    causal, full = attention(), attention(causal=False)
    assert score_flops_per_token(full, 4096) / score_flops_per_token(causal, 4096) == pytest.approx(2.0, rel=1e-3)
    _, half = layer_seconds(causal, ATTENTION)
    _, whole = layer_seconds(full, ATTENTION)
    assert 1.8 < float(whole.core[0] / half.core[0]) < 2.0
    asked = design(model(), Layout())
    layers = tuple(replace(layer, mixer=replace(layer.mixer, causal=False)) for layer in asked.model.layers)
    runtime = [rule for rule in RULES if rule.scope is Scope.RUNTIME]
    refused = [rule.name for rule in runtime if rule(replace(asked, model=replace(asked.model, layers=layers)))]
    assert refused == ["runtime-layers"]


def test_experts_of_few_rows_wait_for_the_host():
    def mixture(experts):
        part = Mixture(width=1024, hidden=256, experts=experts, top_k=1, norm=None)
        return layer_seconds(Layer(mixer=None, transform=part), MIXTURE, sequence=1024)[1]

    least = 3 * 256 * STACK.expert_seconds
    assert least < float(mixture(256).forward[0]) < 1.5 * least
    assert mixture(8).forward < 0.5 * mixture(256).forward


def test_recurrences_cost_by_chunks_not_by_the_square_of_the_length():
    layer = Layer(
        mixer=Recurrence(width=2048, inner=4096, heads=64, state=128, groups=8, convolution=4, norm=None),
        transform=None,
    )
    part, short = layer_seconds(layer, RECURRENCE, sequence=4096)
    _, long = layer_seconds(layer, RECURRENCE, sequence=16384)
    assert float(long.forward[0] / short.forward[0]) == pytest.approx(4.0, rel=0.02)
    # 2405.21060, section 6: chunks of 128, squares of 8 groups of 128 states, tiles of 64 rows that 4,096 features see,
    # and two products of states.
    assert float(part.score_flops[0]) == 4096 * (2 * 128 * 8 * 128 + (128 + 64) * 4096 + 4 * 4096 * 128)


def test_plain_norms_cost_what_eager_operators_move():
    layer = attention()
    quick, plain = sizes(), replace(sizes(), composite_norms=True)
    fused, apart = (next(p for p in block_work(layer, each) if p.name == "norm") for each in (quick, plain))
    assert apart.traffic == 10 * fused.traffic
    assert SOFTWARE["scaling"].writes_norms_out(DeviceKind.CUDA)
    assert not SOFTWARE["scaling-fused-norms"].writes_norms_out(DeviceKind.CUDA)


def test_attention_that_is_not_fused_reads_and_writes_every_score():
    """Two products forward and four backward of all scores; a softmax that knows its mask reads half of them."""
    part, found = layer_seconds(attention(), ATTENTION, device="A100-80GB", software=SOFTWARE["scaling-fused-softmax"])
    rate = figures("A100-80GB", software=SOFTWARE["scaling-fused-softmax"])
    count, length, width = 32.0, np.array([4096.0]), np.array([128.0])
    inner, outer = (
        count * product_seconds(length, *dims, rate.head, together=count) for dims in ((length, width), (width, length))
    )
    seen = (1.0 + 1.0 / 4096) / 2.0
    once = float(part.scores[0]) * 2.0 / rate.bandwidth
    assert found.core == pytest.approx(inner + outer + once * (1.0 + seen), rel=1e-3)
    assert found.core_backward == pytest.approx(inner + 3.0 * outer + once * (1.0 + 2.0 * seen), rel=1e-3)
    _, plain = layer_seconds(attention(), ATTENTION, device="A100-80GB", software=SOFTWARE["scaling-plain-softmax"])
    assert plain.core - found.core == pytest.approx(once * (5.0 - seen), rel=1e-3)
    _, flash = layer_seconds(attention(), ATTENTION, device="A100-80GB", software=SOFTWARE["scaling"])
    assert flash.core < 0.5 * found.core


@pytest.mark.parametrize("feature", ["added_biases", "summed_biases", "dropout", "unfused"])
def test_what_kernels_of_their_own_do_is_moved(feature):
    layer = attention(qkv_bias=True, output_bias=True)
    plain, own = sizes(), replace(sizes(), **{feature: True})
    less, more = (next(p for p in block_work(layer, each) if p.name == ATTENTION) for each in (plain, own))
    elements = 4096 * 4096  # tokens by features
    forward = {"added_biases": 2 * 2 * 3, "summed_biases": 0, "dropout": 1, "unfused": 2 * 2}
    backward = {"added_biases": 0, "summed_biases": 2 * 4, "dropout": 1, "unfused": 2 * 2 * 4}
    assert float((more.traffic - less.traffic)[0]) == forward[feature] * elements
    assert float((more.backward_traffic - less.backward_traffic)[0]) == backward[feature] * elements


def test_eight_bits_reach_less_of_their_peak_where_that_was_measured():
    """MAMF of ml-engineering: 70.9 % of the peak in fp8 on H100, 80.3 % in bf16."""
    h100 = devices()["H100"].matrix
    assert h100[Precision.FP8].fraction / h100[Precision.BF16].fraction == pytest.approx(0.709 / 0.803)


def test_finer_scales_move_more():
    recipes = (Precision.BF16, Precision.FP8, Precision.MXFP8, Precision.FP8_BLOCK, Precision.NVFP4)
    moved = [sum(quantize_bytes(recipe)) for recipe in recipes]
    assert moved == sorted(moved)
    assert moved[0] == 0.0


def test_scales_of_rows_cost_another_read_of_every_operand_than_those_of_blocks():
    """Forward sums over columns and the weights' gradient over rows, and each needs a largest magnitude of its own."""
    block, row = quantize_bytes(Precision.FP8_BLOCK), quantize_bytes(Precision.FP8_ROW)
    scales = Precision.FP8_BLOCK.stored_bytes - Precision.FP8_ROW.stored_bytes
    assert row == pytest.approx(tuple(entry - 2.0 * scales + 4.0 for entry in block))
    for device in devices().values():
        assert device.peak_flops.get(Precision.FP8_ROW) == device.peak_flops.get(Precision.FP8)


def test_every_device_has_a_node():
    assert set(nodes()) == set(devices())


@pytest.mark.parametrize(
    ("device", "kind", "most"),
    [
        ("A100-80GB-PCIe", "product", 0.03),
        ("A100-80GB-PCIe", "weight gradient", 0.035),
        ("A100-80GB-PCIe", "attention forward", 0.03),
        ("A100-80GB-PCIe", "attention backward", 0.03),
        ("A100-80GB-PCIe", "experts", 0.06),
        ("B200", "product", 0.13),
        ("B200", "weight gradient", 0.13),
        ("B200", "experts", 0.11),
        ("B200", "sustained product", 0.2),
        ("B300", "sustained product", 0.11),
        ("GB200", "sustained product", 0.07),
        ("GB300", "sustained product", 0.07),
    ],
)
def test_kernels_that_others_measured_are_met(device, kind, most):
    path = Path(__file__).parents[2] / "benchmarks" / "kernels" / "run.py"
    spec = importlib.util.spec_from_file_location("kernels_benchmark", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    count, error, _ = module.errors()[device, kind]
    assert count >= 8
    assert error < most
