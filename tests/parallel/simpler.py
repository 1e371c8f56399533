"""Draws that are simpler than one that fails, in one thing each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
            most = one.size(AxisName.REPLICATE) * one.size(AxisName.SHARD) - 1
            one = replace(one, empty_rows=min(draw.empty_rows, most), placement=_swapped(one))
            if name == AxisName.TENSOR.value:
                yield replace(one, tensor_grid=Draw().tensor_grid)
            yield _restaged(one) if name == AxisName.PIPELINE.value else one


def _fewer_layers(draw: Draw) -> Iterator[Draw]:
    for layers in range(1, draw.layers):
        frozen = tuple(block for block in draw.frozen if block <= layers)
        for some in (slice(layers), slice(-layers, None)):
            kept = {name: _of_blocks(getattr(draw, name), some) for name in ("shards", "extents", "offloads")}
            own = {"recompute": draw.recompute[some], "kinds": draw.kinds[some]}
            yield _restaged(replace(draw, layers=layers, frozen=frozen, **kept, **own))


def _of_blocks(values: tuple[Any, ...], some: slice) -> tuple[Any, ...]:
    """Of what each block has what both ends and some of the layers have."""
    return (*values[:1], *values[1:-1][some], *values[-1:])


def _swapped(draw: Draw) -> tuple[int, ...]:
    """The first two ranks on the devices of one another, where any lie elsewhere."""
    return (1, 0, *range(2, draw.ranks)) if draw.placement and draw.ranks > 1 else ()


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
        "steps",
        "kinds",
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
        "tied",
        "positions",
        "length",
        "groups",
        "empty_rows",
        "placement",
        "offloads",
    ):
        yield replace(draw, **{name: getattr(plain, name)})
    yield replace(draw, recompute=("none",) * draw.layers)
    for layer in range(draw.layers):
        yield replace(draw, recompute=(*draw.recompute[:layer], "none", *draw.recompute[layer + 1 :]))
        if draw.kinds:
            yield replace(draw, kinds=(*draw.kinds[:layer], "plain", *draw.kinds[layer + 1 :]))
    for block, kind in enumerate(draw.offloads):
        if kind != plain.offload:
            yield replace(draw, offloads=(*draw.offloads[:block], plain.offload, *draw.offloads[block + 1 :]))
    yield _restaged(draw)
    yield replace(draw, empty_rows=min(draw.empty_rows, 1))
    yield replace(draw, placement=_swapped(draw))
    for kind in ("1f1b", "gpipe") if draw.table or draw.slices > 1 else ("1f1b",):
        yield _restaged(replace(draw, schedule=kind, chunks=1, slices=1, table=()))
    for microbatches in range(1, draw.microbatches - draw.fewer):
        shorter = planned.of_first(scheduled(draw), microbatches)
        yield replace(draw, microbatches=microbatches, fewer=0, table=shorter.table)
