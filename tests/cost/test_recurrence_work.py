"""State-space and linear-attention mixers, kernel by kernel, beside what their kernels do and what others measured."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.catalog.devices import devices
from meshwright.cost.compute import part_seconds
from meshwright.cost.operators import block_work
from meshwright.cost.rates import rates
from meshwright.cost.recurrence_work import RECURRENCE, backward_kernels, forward_kernels
from meshwright.cost.scan_seconds import scan_seconds
from meshwright.cost.stacks import SOFTWARE
from meshwright.cost.table import PRECISIONS
from meshwright.cost.work import Kernel, Scan, Sizes
from meshwright.spec.cluster import Precision
from meshwright.spec.model import Layer, Recurrence

INNER, STATE, GROUPS, HEADS, CHUNK = 4096, 128, 8, 64, 128  # Nemotron 3 Nano
STACK = SOFTWARE["megatron-core"]


def mixer(*, heads=HEADS, head_dim=64, state=STATE, groups=GROUPS, delta=False):
    return Recurrence(
        width=2688,
        inner=heads * head_dim,
        heads=heads,
        state=state,
        groups=groups,
        convolution=4,
        norm=None,
        delta=delta,
    )


def sizes(*, batch=1.0, sequence=8192, tensor=1.0, tokens_first=False):
    one = np.ones(1)
    return Sizes(
        batch=batch * one,
        sequence=float(sequence),
        tensor=tensor * one,
        split=one,
        itemsize=2.0 * one,
        tokens_first=tokens_first,
    )


def figures(kernels):
    return {kernel.name: (float(np.sum(kernel.flops)), float(np.sum(kernel.bytes))) for kernel in kernels}


def work(part, shape):
    return next(work for work in block_work(Layer(mixer=part, transform=None), shape) if work.name == RECURRENCE)


def kernel_seconds(part, *, device, shape, beside=()):
    """Seconds forward and backward of the kernels that are not called `beside`."""
    bf16 = np.array([PRECISIONS.index(Precision.BF16)])
    found = rates(devices()[device], precision=bf16, length=int(shape.sequence), software=STACK)
    scan = work(part, shape).scan
    kernels = {
        name: tuple(kernel for kernel in getattr(scan, name) if not any(word in kernel.name for word in beside))
        for name in ("forward", "backward")
    }
    seconds = scan_seconds(
        replace(scan, **kernels),
        vector_peak=found.vector_peak,
        fused=(found.attention.forward, found.attention.backward),
        bandwidth=found.bandwidth,
    )
    return tuple(float(one[0]) for one in seconds)


def test_kernels_of_mamba2_forward():
    """Features of 2 bytes; in fp32 states at the end of each chunk, of 4,096 x 128, and scores of 8 groups."""
    features, keys, states, scores = 2 * INNER, 2 * GROUPS * STATE, INNER * STATE // CHUNK, 4 * GROUPS * CHUNK
    assert figures(forward_kernels(mixer(), sizes())) == {
        "convolution": (0, 2 * (features + 2 * keys)),
        "steps": (0, HEADS * (2 + 4 + 4)),
        "states": (2 * INNER * STATE, features + keys + 4 * states),
        "passing": (0, 6 * states),
        "scores": (2 * GROUPS * STATE * CHUNK, 2 * keys + scores),
        "scan": (2 * INNER * STATE + INNER * (CHUNK + 64), 4 * features + keys + 2 * states + scores),
        "norm": (0, 2 * features),
    }


def test_backward_of_mamba2_does_states_and_scores_again_and_has_five_products_for_two():
    found = figures(backward_kernels(mixer(), sizes()))
    once, causal, square = 2 * INNER * STATE, INNER * (CHUNK + 64), 2 * GROUPS * STATE * CHUNK
    assert sum(flops for flops, _ in found.values()) == 5 * once + 3 * causal + 3 * square
    assert found["states"][1] == figures(forward_kernels(mixer(), sizes()))["states"][1]
    assert found["passing"][1] == 8 * INNER * STATE / CHUNK
    assert found["passing back"][1] == (4 + 4 + 2 + 2) * INNER * STATE / CHUNK
    assert found["gate back"][1] == 6 * 2 * INNER
    assert found["keys back"] == (once, 2 * (INNER + 1024) + 2 * INNER * STATE / CHUNK + 12 * 1024)
    assert found["convolution back"][1] == 3 * 2 * (INNER + 2048)


def test_the_delta_rule_by_its_products():
    """Of a head of 128 x 128 in chunks of 64, whose keys serve two heads of values."""
    part = mixer(heads=32, head_dim=128, groups=16, delta=True)
    found = figures(forward_kernels(part, sizes()))
    state, chunk = 2 * 128 * 128, 2 * 64 * 128
    assert found["solve"][0] == 32 * chunk / 2
    assert found["corrections"][0] == 32 * 2 * chunk
    assert found["states"] == (32 * 2 * state, 32 * 2 * (4 * 128 + 128 * 128 / 64))
    assert found["output"][0] == 32 * (state + 2 * chunk)
    back = figures(backward_kernels(part, sizes()))
    assert back["states back"][0] == 32 * 3 * state
    assert back["keys and queries back"][0] == 32 * (4 * state + 3 * chunk)
    assert back["corrections back"][0] == 32 * (7 * chunk + 4 * 64 * 64)


def test_tensor_ranks_share_heads_and_have_a_group_each_at_the_least():
    whole, part = (figures(forward_kernels(mixer(), sizes(tensor=tensor))) for tensor in (1.0, 8.0))
    assert part == {name: (flops / 8, bytes_ / 8) for name, (flops, bytes_) in whole.items()}
    beyond = figures(forward_kernels(mixer(), sizes(tensor=16.0)))
    assert beyond["scores"] == part["scores"]
    assert beyond["norm"][1] == part["norm"][1] / 2


def test_several_sequences_whose_tokens_lie_first_are_laid_out_anew():
    features = 3 * INNER + 2 * GROUPS * STATE + HEADS
    for batch, moved in ((1.0, 0.0), (2.0, 2 * 2 * features)):
        for kernels in (forward_kernels, backward_kernels):
            found = figures(kernels(mixer(), sizes(batch=batch, tokens_first=True)))
            assert found["layout"] == (0.0, moved)
    assert "layout" not in figures(forward_kernels(mixer(), sizes(batch=2.0)))


MEASURED = {  # heads, their sequences and length; milliseconds forward and backward
    ("H200", 32, 1, 8192): (0.472, 1.444),
    ("H200", 32, 1, 32768): (1.890, 5.697),
    ("H200", 8, 1, 32768): (0.902, 2.743),
    ("GB200", 32, 1, 8192): (0.482, 1.552),
    ("GB200", 32, 1, 32768): (1.839, 6.171),
    ("GB200", 8, 1, 32768): (1.085, 3.191),
}


def ratios(case):
    """Of a case what is told over what was measured, forward and backward."""
    device, heads, batch, length = case
    part = mixer(heads=heads, head_dim=128, groups=heads // 2 if heads > 8 else 2, delta=True)
    shape = sizes(batch=float(batch), sequence=length)
    found = kernel_seconds(part, device=device, shape=shape, beside=("norm", "convolution"))
    return [1e3 * one / measured for one, measured in zip(found, MEASURED[case], strict=True)]


@pytest.mark.parametrize("case", MEASURED)
def test_the_delta_rule_takes_what_was_measured(case):
    """Triton's columns of QwenLM/FlashQLA@c18a486 benchmark/benchmark_results_*.txt, heads of 128 x 128, half or a
    quarter as many of keys; without norms, gates and the convolution."""
    assert ratios(case) == pytest.approx([1.0, 1.0], rel=0.3)


def test_the_delta_rule_takes_no_more_and_no_less_over_all_that_was_measured():
    assert np.mean(np.log([ratios(case) for case in MEASURED]), axis=0) == pytest.approx([0.0, 0.0], abs=0.08)


def test_mamba2_takes_what_was_measured_forward():
    """128 heads of 64 features, one group: 12.6 million tokens/s on H100 (vllm-project/vllm pull 27299), chunks of 256
    there; without the convolution and the norm."""
    part = mixer(heads=128, groups=1)
    forward, _ = kernel_seconds(part, device="H100", shape=sizes(), beside=("norm", "convolution"))
    assert forward == pytest.approx(8192 / 12.6e6, rel=0.3)


def test_few_heads_of_a_long_sequence_wait_for_its_chunks():
    """2.31 ms backward of 4 heads of one sequence of 32,768 tokens on H200, 1.06 ms of eight of 4,096 (same tables)."""
    part = mixer(heads=4, head_dim=128, groups=2, delta=True)
    long, short = (
        kernel_seconds(part, device="H200", shape=sizes(batch=batch, sequence=length), beside=("norm", "convolution"))
        for batch, length in ((1.0, 32768), (8.0, 4096))
    )
    assert long[1] == pytest.approx(2.31e-3, rel=0.2)
    assert short[1] == pytest.approx(1.06e-3, rel=0.2)


def test_kernels_are_bound_by_their_bytes_or_by_vector_units():
    quick = Kernel(name="quick", flops=np.array([6.0]), bytes=np.array([8.0]), reach=3.0)
    slow = Kernel(name="slow", flops=np.array([6.0]), bytes=np.array([8.0]), reach=0.5)
    moved = Kernel(name="moved", bytes=np.array([20.0]))
    late = Kernel(name="late", flops=np.array([1.0]), bytes=np.array([1.0]), least=9.0)
    scan = Scan(forward=(quick, moved), backward=(slow, late))
    one = np.ones(1)
    forward, backward = scan_seconds(scan, vector_peak=one, fused=(2.0 * one, 2.0 * one), bandwidth=4.0)
    assert float(forward[0]) == 6.0 / 2.0 + 20.0 / 4.0
    assert float(backward[0]) == 6.0 / 0.5 + 9.0


def test_selective_recompute_does_no_scan_again():
    shape = sizes()
    part = work(mixer(), shape)
    bf16 = np.array([PRECISIONS.index(Precision.BF16)])
    found = rates(devices()["H100"], precision=bf16, length=8192, software=STACK)
    seconds = part_seconds(part, device=devices()["H100"], rates=found, software=STACK)
    assert float(seconds.core[0]) == 0.0
    assert float(seconds.forward[0]) > float(np.sum(seconds.products.entering + seconds.products.leaving))
