"""What stacks of software keep beside parameters, their optimizer and activations, against figures counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import Costs, PlanTable, evaluate
from meshwright.cost.kept import kept_eager
from meshwright.cost.operators import HEAD, block_work
from meshwright.cost.stacks import SOFTWARE
from meshwright.cost.table import PRECISIONS, RECOMPUTES
from meshwright.cost.work import Sizes
from meshwright.spec.cluster import Precision
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.plan import Recompute
from meshwright.spec.report import MemoryPart
from tests.cost.cost_examples import even_layout, llama, selene

LENGTH, VOCAB = 512, 2048
MODEL = llama(width=512, hidden=1408, layers=4, vocab=VOCAB, heads=8)
JOB = JobSpec(
    sequence_length=LENGTH,
    batch_tokens=16 * LENGTH,
    precision=Precision.BF16,
    data=DataSpec(document_mask=False),
)
PIPES = SOFTWARE["megatron-deepspeed"]
PLAIN = replace(PIPES, keeps_terms=False, keeps_logits=False)


def held(monkeypatch: pytest.MonkeyPatch, software: object, **columns: int) -> Costs:
    """Bytes on both stages of two, layers computed again."""
    usual = {"pipeline": 2, "microbatches": 4, "microbatch": 2, "recompute": RECOMPUTES.index(Recompute.FULL)}
    table = PlanTable.build(usual | columns, layouts=[even_layout(layers=4, pipeline=2)])
    monkeypatch.setattr("meshwright.cost.stacks.SOFTWARE", {**SOFTWARE, "tried": software})
    return evaluate(table, model=MODEL, cluster=selene(nodes=1), job=replace(JOB, software="tried"), every_rank=True)


def test_gradients_of_the_last_microbatch_lie_in_bf16_beside_their_sum_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, beside = (held(monkeypatch, replace(PLAIN, keeps_terms=keeps)) for keeps in (False, True))
    gradients = [costs.memory[MemoryPart.GRADIENTS][0] for costs in (plain, beside)]
    assert gradients[1] / gradients[0] == pytest.approx(6.0 / 4.0)
    half = {
        "precision": PRECISIONS.index(Precision.FP16),
        "gradient_precision": PRECISIONS.index(Precision.FP16),
    }
    narrow = [
        held(monkeypatch, replace(PLAIN, keeps_terms=keeps), **half).memory[MemoryPart.GRADIENTS][0]
        for keeps in (False, True)
    ]
    assert (narrow[0] == narrow[1]).all()


def test_logits_of_two_microbatches_lie_in_the_buffers_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 on the last stage alone, and of one microbatch where there is no other."""
    logits = 4.0 * 2 * LENGTH * VOCAB
    plain, keeps = (held(monkeypatch, replace(PLAIN, keeps_logits=keeps)) for keeps in (False, True))
    more = (sum(keeps.memory.values()) - sum(plain.memory.values()))[0]
    assert more[0] == 0.0
    assert logits <= more[1] <= 2.0 * logits
    buffers = [
        held(monkeypatch, replace(PLAIN, keeps_logits=keeps), microbatches=1).memory[MemoryPart.BUFFERS][0, 1]
        for keeps in (False, True)
    ]
    assert buffers[0] == buffers[1]


def test_tensor_ranks_that_have_all_logits_hold_and_read_the_whole_vocabulary() -> None:
    one = np.ones(1)
    laid = Sizes(batch=one, sequence=float(LENGTH), tensor=4.0 * one, split=one, itemsize=2.0 * one)
    parts, whole = (
        sum(part.logits for part in kept_eager(MODEL.head, laid, replace(SOFTWARE["scaling"], whole_logits=all_)))
        for all_ in (False, True)
    )
    assert float(whole[0]) == 4.0 * float(parts[0]) == 4.0 * LENGTH * VOCAB
    divided, read = (
        next(part for part in block_work(MODEL.head, replace(laid, whole_logits=all_)) if part.name == HEAD)
        for all_ in (False, True)
    )
    # Joined forward and taken apart backward, each read and written; gathered as half of an all-reduce of 2,048.
    joined = LENGTH * VOCAB * 2.0 * 2.0
    assert float((read.traffic - 4.0 * divided.traffic)[0]) == joined
    assert float((read.backward_traffic - 4.0 * divided.backward_traffic)[0]) == joined / 4.0
    assert (read.exchanges.forward, read.exchanges.gathers_forward) == (0.5 * VOCAB / 512, 1.0 + VOCAB / 512)
