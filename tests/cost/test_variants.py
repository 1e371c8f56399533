"""What may be said after the name of any stack, and heads that go forward and back in runs of tokens."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost.loss_chunks import loss_runs
from meshwright.cost.operators import HEAD, block_work
from meshwright.cost.stacks import SOFTWARE, software
from meshwright.cost.work import LossKernel, Sizes
from meshwright.spec.cluster import AttentionKernel
from meshwright.spec.errors import ConfigError
from meshwright.spec.model import Head
from meshwright.spec.report import MemoryPart
from tests.cost.cost_examples import llama
from tests.cost.test_stacks import WIDE, seconds


def test_what_is_said_of_a_stack_changes_that_alone():
    for name, plain in SOFTWARE.items():
        flash = replace(plain, attention_kernel=AttentionKernel.FLASH_2, torch_attention=False)
        assert software(f"{name}-flash-2") == flash
        assert software(f"{name}-chunked") == replace(plain, loss_chunks=8)
    several = software("megatron-core-flash-1-linear-loss-blocking:mlp")
    assert (several.attention_kernel, several.loss_kernel) == (AttentionKernel.FLASH_1, LossKernel(early=True))
    assert several.waits_for_kernels
    assert several.repeats == software("megatron-core:mlp").repeats
    for unknown in ("-flash-2", "torch-flash-2-flash-2", "torch-blocking-flash-2", "torch-flash-3"):
        with pytest.raises(ConfigError, match="with any of -flash-1"):
            software(unknown)


def test_the_second_flash_attention_is_slower_than_cudnn_on_hopper():
    model = llama(**WIDE)
    native, second = (
        seconds(model, software=name, sequence=8192).step_seconds for name in ("megatron-core", "megatron-core-flash-2")
    )
    assert second > 1.02 * native


def test_runs_of_tokens_leave_the_work_and_a_share_of_the_logits():
    model = llama(**WIDE | {"vocab": 256000})
    whole, runs = (seconds(model, software=name, microbatch=16) for name in ("torch", "torch-chunked"))
    before, after = (report.memory[0].parts[MemoryPart.LOGITS] for report in (whole, runs))
    assert after == pytest.approx(before / 8.0)
    assert runs.step.flops == pytest.approx(whole.step.flops)
    assert whole.step_seconds < runs.step_seconds < 1.1 * whole.step_seconds


def test_gradients_that_are_formed_with_the_loss_are_not_scaled_run_by_run():
    """Liger's kernel reads logits twice and writes gradients over them, all of it forward; then gradients of the matrix
    are added run by run."""
    head = Head(vocab=1024, width=64, norm=None)
    one = np.ones(1)
    sizes = Sizes(
        batch=one, sequence=64.0, tensor=one, split=one, itemsize=2.0 * one, loss_kernel=LossKernel(early=True)
    )
    parts = [
        next(part for part in block_work(head, replace(sizes, loss_chunks=chunks)) if part.name == HEAD)
        for chunks in (1, 4)
    ]
    logits = 64.0 * 1024.0
    assert [float(part.traffic[0] / logits) for part in parts] == [6.0, 6.0]
    assert float(parts[0].backward_traffic[0]) == 4.0 * logits
    assert float(parts[1].backward_traffic[0]) == 3.0 * 2.0 * 3.0 * 1024.0 * 64.0
    assert [float(part.products[0].flops[0]) for part in parts] == [2.0 * 64.0 * 1024.0 * 64.0] * 2


def test_ligers_runs_have_about_as_many_logits_as_all_tokens_have_features():
    """32,768 tokens by a vocabulary of 32 times the width: runs of 1,024; of 30 times, 2,048 (a power of two)."""
    tokens = np.array([32768.0])
    for vocab, runs in ((32 * 1024, 32.0), (30 * 1024, 16.0), (1024, 1.0)):
        assert loss_runs(Head(vocab=vocab, width=1024, norm=None), 0, tokens) == runs
    assert loss_runs(Head(vocab=1024, width=1024, norm=None), 8, tokens) == 8.0
