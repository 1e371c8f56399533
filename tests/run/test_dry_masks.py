"""Peaks under masks of documents, which jobs have unless they say otherwise, of slices, and of V shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.cost.fixed_buffers import workspace_bytes
from meshwright.cost.software import software
from meshwright.schedule.build import V_SHAPES
from meshwright.spec.plan import Design, Recompute, ScheduleKind, Sharding
from tests.run import dry_cases
from tests.run.test_dry_memory import DENSE, MACHINES, asked, hold
from tests.support.designs import Layout

# Masks of documents, which kernels take with as many keys as queries.
DOCUMENTS = {
    "documents": Layout(batch=2),
    "documents under tensor": Layout(tensor=2, sequence_parallel=True, microbatch=2, batch=4),
    "documents, scores computed again": Layout(recompute=Recompute.SELECTIVE, batch=2),
    "documents, computed again": Layout(recompute=Recompute.FULL, batch=2),
    "documents and zero3": Layout(shard=4, sharding=Sharding.PARAMETERS, recompute=Recompute.SELECTIVE, batch=8),
    "documents of halves of backwards": Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=4),
    "documents over context ranks": Layout(context=2, batch=2),
}


def documents(name: str) -> Design:
    found = asked(DENSE, DOCUMENTS[name])
    return replace(found, job=replace(found.job, data=replace(found.job.data, document_mask=True)))


def test_peaks_under_masks_of_documents_are_predicted() -> None:
    hold({name: documents(name) for name in list(DOCUMENTS)[:2]})


@pytest.mark.slow
def test_peaks_of_other_layouts_under_them_are_too() -> None:
    hold({name: documents(name) for name in list(DOCUMENTS)[2:]})


# Keys and weights that every slice has anew; and what two stages compute again waits for gradients of weights.
SLICED = Layout(pipeline=2, kind=ScheduleKind.SEQUENCE_1F1B, slices=4, microbatch=2, batch=8)
TURNED = Layout(pipeline=2, chunks=2, kind=ScheduleKind.ZERO_BUBBLE_V, recompute=Recompute.FULL, batch=8)


@pytest.mark.slow
def test_peaks_of_v_shapes_that_compute_again_are_predicted() -> None:
    hold({kind.value: asked(DENSE, replace(TURNED, kind=kind)) for kind in V_SHAPES})


def test_peaks_of_slices_are_told_within_a_hundredth() -> None:
    """What later slices leave of gradients for the keys of earlier ones is not told."""
    layouts = [SLICED, replace(SLICED, recompute=Recompute.SELECTIVE), replace(SLICED, recompute=Recompute.FULL)]
    entries = [asked(DENSE, layout) for layout in layouts]
    workspace = workspace_bytes(MACHINES.groups[0].device, software=software("torch"))
    for entry, ranks in zip(entries, dry_cases.apart(dry_cases.count_whole, designs=entries), strict=True):
        told = {stage.rank: stage.allocated for stage in cost.predict(entry).memory}
        for count in ranks:
            counted = sum(count.memory.values()) + workspace
            assert told[count.rank] == pytest.approx(counted, rel=0.012), (entry.plan.describe(), count.rank)
