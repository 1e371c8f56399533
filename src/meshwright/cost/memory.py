"""Bytes at the peak of every pipeline rank, by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwright.cost.block_bytes import Holds
from meshwright.cost.bucket_bytes import OnTheWay, on_the_way
from meshwright.cost.compression import compression_bytes
from meshwright.cost.copies import copied_bytes
from meshwright.cost.extents import Extent, by_extent
from meshwright.cost.fixed_buffers import fixed_bytes, shared_bytes
from meshwright.cost.holding import Holdings, collect
from meshwright.cost.layouts import LayoutArrays
from meshwright.cost.moments import heaviest_moment
from meshwright.cost.offload import host_room, keeps_parameters_away, optimizes_away
from meshwright.cost.optimizers import Optimized, kept_bytes, step_bytes
from meshwright.cost.parameters import (
    Shared,
    gathered_of,
    grid_parameters,
    local_parameters,
    owned_of,
    sharded_as,
    trained_of,
    untrained,
)
from meshwright.cost.pipeline import Shape, held
from meshwright.cost.round_memory import RoundBytes, round_bytes
from meshwright.cost.software import Software
from meshwright.cost.stage_order import in_turns, turns
from meshwright.cost.states import (
    ZERO1,
    ZERO2,
    Local,
    experts_apart,
    experts_units,
    left_bytes,
    state_bytes,
    states,
    without_parameters,
)
from meshwright.cost.table import BoolArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind, NodeGroup, Precision
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Embedding, Layer, ModelSpec
from meshwright.spec.report import MemoryPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes of every rank at its peak, shape (rows, ranks): `parts` by MemoryPart on the device, and what it keeps in
    the `host`'s memory at the most, of which it has `host_room`, shape (rows, 1)."""

    parts: dict[str, FloatArray]
    host: FloatArray
    host_room: FloatArray

    def on(self, group: NodeGroup, table: PlanTable, *, valid: BoolArray) -> Peak:
        """The same on the `valid` ranks of `group`, in which `what_memory_counts` is the same."""
        reserved = np.where(valid, group.device.reserved_bytes, 0.0)
        return replace(
            self, parts={**self.parts, str(MemoryPart.RESERVED): reserved}, host_room=host_room(table, group)
        )


def memory(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    shape: Shape,
    model: ModelSpec,
    group: NodeGroup,
    job: JobSpec,
    software: Software,
    least: bool = False,
) -> Peak:
    """Bytes on every rank shown at the rank's own peak. At the `least` it is not known which moment is the peak, and
    that of most plans is taken."""
    device = group.device
    changed = trained_of(blocks, kinds=arrays.kinds)
    extents = by_extent(table, changed, arrays=arrays, counts=counts, model=model)
    optimized = Optimized(table=table, arrays=arrays, counts=counts, model=model, spec=job.optimizer)
    local = _local(table, blocks, changed, extents, optimized, eager=software.eager)
    state = states(table, local, away=optimizes_away(table), software=software, device=device)
    state = without_parameters(state, keeps_parameters_away(table), table=table, local=local)
    source = Holdings(
        table=table,
        blocks=blocks,
        arrays=arrays,
        model=model,
        hidden=_hidden_bytes(table, model=model, job=job),
        shared=shared_bytes(table, arrays=arrays, model=model, job=job, device=device, software=software),
        turns=turns(table, shape),
        eager=software.eager,
    )
    fixed = fixed_bytes(table, arrays=arrays, counts=counts, model=model, device=device, job=job, software=software)
    entry = collect(source, counts, shape=shape, fixed=fixed)
    met = round_bytes(table, local.trained_owned, model=model, largest=partial(_largest_block, extents, changed))
    peak = heaviest_moment(
        state,
        entry,
        source,
        counts=counts,
        shape=shape,
        kind=device.kind,
        software=software,
        way=_way(extents, changed, optimized, processor=device.kind is DeviceKind.CPU),
        besides=() if met is None else (met.between(state.after, entry.fixed, gathered=state.gathered),),
        least=least,
    )
    passing = partial(_passing_host, table, local, changed, extents, arrays=arrays, counts=counts, model=model)
    host = _on_host(table, blocks, local, counts=counts, shape=shape, passing=passing)
    beside = _beside_training(table, local, met, job=job, group=group)
    parts = {
        MemoryPart.PARAMETERS: state.parameters - peak["freed"],
        MemoryPart.GRADIENTS: peak["gradients"] - state.left,
        MemoryPart.OPTIMIZER: state.optimizer,
        MemoryPart.ACTIVATIONS: peak["activations"],
        MemoryPart.LOGITS: peak["logits"],
        MemoryPart.BUFFERS: np.where(shape.valid, peak["buffers"] + state.left + beside, 0.0),
        MemoryPart.RESERVED: np.where(shape.valid, device.reserved_bytes, 0.0),
    }
    return Peak(parts={str(part): held for part, held in parts.items()}, host=host, host_room=host_room(table, group))


def what_memory_counts(group: NodeGroup, job: JobSpec) -> tuple[object, ...]:
    """All that `memory` reads of `group` but what is reserved and its host's room: where it is the same, as much is
    held beside those. Only what copies in memory hold is by the devices of a node."""
    device = group.device
    narrow = (Precision.FP8 in device.peak_flops, Precision.NVFP4 in device.peak_flops)
    return device.kind, narrow, group.devices_per_node if job.elastic.on else None


def _way(
    extents: Sequence[Extent], changed: Sequence[Holds], optimized: Optimized, *, processor: bool
) -> OnTheWay | None:
    """What gradients of the trained blocks take on their way, those of a rank's last stage told apart where stages end
    one after another."""
    found, table = on_the_way(extents, optimized, processor=processor), optimized.table
    if found is None or not in_turns(table).any():
        return found
    arrays, model = optimized.arrays, optimized.model
    counts = dict.fromkeys(optimized.counts, optimized.counts["last"])
    last = by_extent(table, changed, arrays=arrays, counts=counts, model=model)
    alone = on_the_way(last, replace(optimized, counts=counts), processor=processor)
    return found if alone is None else replace(found, early=alone.after)


def _local(
    table: PlanTable,
    blocks: Sequence[Holds],
    changed: Sequence[Holds],
    extents: Sequence[Extent],
    optimized: Optimized,
    *,
    eager: bool,
) -> Local:
    """Parameters of every rank and what the optimizer keeps of those of `changed` blocks, which are trained and lie in
    `extents`. No experts are apart where nothing is `eager`."""
    arrays, counts, model = optimized.arrays, optimized.counts, optimized.model
    whole = local_parameters(table, blocks, arrays=arrays, counts=counts, model=model)
    gathered = gathered_of(blocks, kinds=arrays.kinds, table=table) if eager else blocks
    passing = local_parameters(table, gathered, arrays=arrays, counts=counts, model=model)
    trained, trained_owned = (
        np.asarray(sum(getattr(each.held, name) for each in extents)) for name in ("whole", "owned")
    )
    among = partial(sharded_as, table=table, arrays=arrays, counts=counts, model=model)
    every = Shared(whole=trained, owned=trained_owned)
    summed = among([ZERO1], all_=every, blocks=changed)
    owned = owned_of(table, blocks, arrays=arrays, counts=counts, model=model)
    gridded = grid_parameters(table, changed, counts=counts)
    return Local(
        whole=whole,
        owned=owned,
        trained=trained,
        trained_owned=trained_owned,
        stays=among([ZERO1, ZERO2], all_=Shared(whole=passing, owned=owned), blocks=gathered).whole,
        summed=summed.whole,
        summed_owned=summed.owned,
        apart=gridded * (experts_apart(table) & eager)[:, None],
        units=gridded * (experts_units(table) & eager)[:, None],
        layers=_in_layers(blocks, arrays=arrays, counts=counts),
        moments=kept_bytes(optimized, trained_owned),
        step=step_bytes(optimized),
        left=sum((_left(each, optimized) for each in extents), 0.0 * trained),
        repeated=sum((each.repeated for each in extents), 0.0 * trained),
    )


def _left(extent: Extent, optimized: Optimized) -> FloatArray:
    """Bytes of what is left of the gradients of some blocks, shape (rows, ranks)."""
    rounded = left_bytes(extent.table, trained=extent.held.whole, owned=extent.held.owned)
    return rounded + compression_bytes(optimized.of_extent(extent.table, extent.counts), extent.held.owned)


def _beside_training(
    table: PlanTable, local: Local, met: RoundBytes | None, *, job: JobSpec, group: NodeGroup
) -> FloatArray:
    """What copies in memory and learners that meet keep all the time, shape (rows, ranks)."""
    copies = copied_bytes(table, local.owned, local.moments, job=job, met=met, per_node=group.devices_per_node)
    return copies if met is None else copies + met.travelling + met.kept


def _largest_block(extents: Sequence[Extent], blocks: Sequence[Holds], *, alone: bool = False) -> FloatArray:
    """The most that a rank owns of one of the trained `blocks`, shape (rows, ranks): of those that no other rank owns
    too where they are meant `alone`."""
    values = np.stack([block.parameters for block in blocks], axis=1)[:, None, :]
    found = []
    for extent in extents:
        whole = np.where(extent.counts["total"][..., :-1] > 0, values, 0.0).max(axis=2)
        owned = whole * extent.held.owned / np.maximum(extent.held.whole, 1.0)
        found.append(np.where(extent.repeated > 0.0, 0.0, owned) if alone else owned)
    return np.asarray(np.max(found, axis=0))


def _on_host(
    table: PlanTable,
    blocks: Sequence[Holds],
    local: Local,
    *,
    counts: Mapping[str, FloatArray],
    shape: Shape,
    passing: Callable[[], FloatArray],
) -> FloatArray:
    """Bytes that are to lie in the host's memory at the most, shape (rows, ranks): activations on their way, or an
    optimizer's state with masters and with gradients that are `passing`; where parameters are there too all of them,
    and all gradients."""
    there, away = _away(blocks, counts=counts, shape=shape), optimizes_away(table)[:, None]
    if not away.any():
        return there
    whole = np.where(keeps_parameters_away(table)[:, None], local.owned, 0.0)
    held = local.trained_owned + whole + passing()
    return there + np.where(away, held * state_bytes(table).master[:, None] + local.moments, 0.0)


def _passing_host(
    table: PlanTable,
    local: Local,
    changed: Sequence[Holds],
    extents: Sequence[Extent],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray:
    """Elements of gradients on their way through the host's memory, shape (rows, ranks): of an optimizer there those
    that step together, embeddings or all else; of parameters there those that are added to a block's, where no
    replicas sum it first: a table that they do sum comes after all others."""
    apart = [isinstance(kind.block, Embedding) for kind in arrays.kinds]
    rest = [untrained(block) if alone else block for block, alone in zip(changed, apart, strict=True)]
    before = by_extent(table, rest, arrays=arrays, counts=counts, model=model)
    others = np.asarray(sum(each.held.owned for each in before))
    last = local.repeated - sum(each.repeated for each in before)
    several = (table.microbatches > 1)[:, None]
    added = np.where(several, np.maximum(_largest_block(extents, changed, alone=True) - last, 0.0), 0.0)
    return np.where(keeps_parameters_away(table)[:, None], added, np.maximum(others, local.trained_owned - others))


def _away(blocks: Sequence[Holds], *, counts: Mapping[str, FloatArray], shape: Shape) -> FloatArray:
    """Bytes that every rank's microbatches under way keep in the host's memory, shape (rows, ranks)."""
    zeros = np.zeros(shape.valid.shape)
    if not any(np.any(block.bytes.away) for block in blocks):
        return zeros
    each = np.stack([block.bytes.away + np.zeros(len(zeros)) for block in blocks], axis=1)[:, None, :]
    names = ("first", "last", "total")
    return held(shape, **{name: (counts[name][..., :-1] * each).sum(axis=2) for name in names})


def _in_layers(blocks: Sequence[Holds], *, arrays: LayoutArrays, counts: Mapping[str, FloatArray]) -> FloatArray:
    """Of `local_parameters`, those in layers, shape (rows, ranks)."""
    values = [
        block.parameters * isinstance(kind.block, Layer) for kind, block in zip(arrays.kinds, blocks, strict=True)
    ]
    return np.asarray(np.einsum("nrk,nk->nr", counts["total"][..., :-1], np.stack(values, axis=1)))


def _hidden_bytes(table: PlanTable, *, model: ModelSpec, job: JobSpec) -> FloatArray:
    """Bytes of one microbatch's hidden features in the precision that multiplies, as one tensor rank holds them."""
    hidden = table.microbatch * job.sequence_length / table.context * model.width * state_bytes(table).compute
    return np.asarray(hidden / table.residual_parts)
