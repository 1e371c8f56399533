"""Draws that are simpler than one that fails, in one thing each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.schedule import planned
from meshwright.spec.plan import AxisName
from tests.parallel.draws import Draw, refused, scheduled


def simpler(draw: Draw) -> Iterator[Draw]:
    """Legal draws that are simpler in one thing, the largest steps first."""
    tries = (*_fewer_ranks(draw), *_fewer_layers(draw), *_plainer(draw))
    for one in tries:
        if one != draw and not refused(one):
            yield one


def _fewer_ranks(draw: Draw) -> Iterator[Draw]:
    for index, (name, size) in enumerate(draw.axes):
        for smaller in (entry for entry in dict.fromkeys((1, 2, size // 2)) if entry < size):
            kept = ((name, smaller),) if smaller > 1 else ()
            axes = (*draw.axes[:index], *kept, *draw.axes[index + 1 :])
            one = replace(draw, axes=axes)
            if one.size(AxisName.SHARD) * one.size(AxisName.CONTEXT) == 1:
                one = replace(one, sharding="none", shards=(), extents=())
            if one.size(AxisName.TENSOR) == 1:
                one = replace(one, sequence_parallel=False)
            if name == AxisName.TENSOR.value:
                yield replace(one, tensor_grid=Draw().tensor_grid)
            yield _restaged(one) if name == AxisName.PIPELINE.value else one


def _fewer_layers(draw: Draw) -> Iterator[Draw]:
    for layers in range(1, draw.layers):
        frozen = tuple(block for block in draw.frozen if block <= layers)
        shards = (*draw.shards[: layers + 1], *draw.shards[-1:])
        extents = (*draw.extents[: layers + 1], *draw.extents[-1:])
        for recompute in (draw.recompute[:layers], draw.recompute[-layers:]):
            kept = {"recompute": recompute, "frozen": frozen, "shards": shards, "extents": extents}
            yield _restaged(replace(draw, layers=layers, **kept))


def _restaged(draw: Draw) -> Draw:
    """With stages as even as the blocks allow, under a schedule that the pipeline has."""
    pipeline = draw.size(AxisName.PIPELINE)
    if pipeline == 1:
        draw = replace(draw, schedule="1f1b", chunks=1, slices=1, table=())
    stages, blocks = pipeline * draw.chunks, draw.layers + 2
    bounds = tuple(round(index * blocks / stages) for index in range(1, stages))
    return replace(draw, bounds=bounds)


def _plainer(draw: Draw) -> Iterator[Draw]:
    plain = Draw()
    for name in (
        "model",
        "exchange",
        "experts",
        "extents",
        "shards",
        "sharding",
        "sequence_parallel",
        "documents",
        "masks",
        "optimizer",
        "z_loss",
        "clip_norm",
        "microbatch",
        "frozen",
        "prefix",
        "factored",
        "routing",
        "offload",
        "tensor_grid",
        "vocab",
        "kv_heads",
        "fewer",
        "moments",
        "gradients",
    ):
        yield replace(draw, **{name: getattr(plain, name)})
    yield replace(draw, recompute=("none",) * draw.layers)
    for layer in range(draw.layers):
        yield replace(draw, recompute=(*draw.recompute[:layer], "none", *draw.recompute[layer + 1 :]))
    yield _restaged(draw)
    for kind in ("1f1b", "gpipe") if draw.table or draw.slices > 1 else ("1f1b",):
        yield _restaged(replace(draw, schedule=kind, chunks=1, slices=1, table=()))
    for microbatches in range(1, draw.microbatches - draw.fewer):
        shorter = planned.of_first(scheduled(draw), microbatches)
        yield replace(draw, microbatches=microbatches, fewer=0, table=shorter.table)
