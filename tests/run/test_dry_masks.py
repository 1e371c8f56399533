"""Peaks under masks of documents, which jobs have unless they say otherwise, of slices, and of V shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.schedule.build import V_SHAPES
from meshwright.spec.model import Layer
from meshwright.spec.plan import Design, Recompute, ScheduleKind, Sharding
from tests.run.test_dry_memory import DENSE, LATENT, MIXER, SPARSE, asked, hold
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


@pytest.mark.slow
def test_peaks_of_as_few_microbatches_as_go_in_pairs_are_predicted() -> None:
    """All of them have gone down before one that came up is back."""
    few = replace(TURNED, kind=ScheduleKind.DUAL_PIPE_V, batch=4)
    shards = replace(few, shard=4, batch=16, sharding=Sharding.OPTIMIZER)
    kept = replace(shards, sharding=Sharding.GRADIENTS, recompute=Recompute.NONE)
    hold({name: asked(DENSE, layout) for name, layout in {"whole": few, "zero1": shards, "zero2": kept}.items()})


AGAIN = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)


def sliced(layer: Layer = DENSE, *, documents: bool = False, layers: int = 8, **changes: Any) -> dict[str, Design]:
    """Whatever is computed again."""
    found = {}
    for again in AGAIN:
        entry = asked(layer, replace(SLICED, recompute=again, **changes), layers=layers)
        data = replace(entry.job.data, document_mask=documents)
        found[again.value] = replace(entry, job=replace(entry.job, data=data))
    return found


@pytest.mark.slow
def test_peaks_of_slices_are_predicted() -> None:
    """With the gradients that later slices leave for the keys of earlier ones."""
    hold(sliced(layers=4))


# Layers, and what else the layout has: keys of many features, windows that first slices lie within, scores written out.
MORE_SLICES: dict[str, tuple[Layer, dict[str, Any]]] = {
    "latent": (replace(DENSE, mixer=LATENT), {}),
    "many keys": (replace(DENSE, mixer=replace(MIXER, kv_heads=8)), {}),
    "experts": (SPARSE, {}),
    "window": (replace(DENSE, mixer=replace(MIXER, window=256)), {}),
    "sinks": (replace(DENSE, mixer=replace(MIXER, sinks=True)), {}),
    "documents": (DENSE, {"documents": True}),
    "all forward first": (replace(DENSE, mixer=LATENT), {"kind": ScheduleKind.GPIPE}),
    "one microbatch": (replace(DENSE, mixer=LATENT), {"batch": 2}),
    "two slices": (DENSE, {"slices": 2}),
    "eight": (replace(DENSE, mixer=LATENT), {"slices": 8}),
    "four ranks": (replace(DENSE, mixer=LATENT), {"pipeline": 4, "slices": 8}),
    "context": (DENSE, {"context": 2}),
    "tensor": (replace(DENSE, mixer=LATENT), {"tensor": 2, "sequence_parallel": True}),
    "zero1": (replace(DENSE, mixer=LATENT), {"shard": 4, "sharding": Sharding.OPTIMIZER, "batch": 32}),
    "zero3": (replace(DENSE, mixer=LATENT), {"shard": 4, "sharding": Sharding.PARAMETERS, "batch": 32}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_SLICES)
def test_peaks_of_other_slices_are_too(name: str) -> None:
    layer, changes = MORE_SLICES[name]
    hold(sliced(layer, **changes))
