"""Bytes at the peak of every pipeline rank, by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwright.cost.block_bytes import BlockBytes, Holds
from meshwright.cost.compression import compression_bytes
from meshwright.cost.copies import copied_bytes
from meshwright.cost.fixed_buffers import fixed_bytes, shared_bytes
from meshwright.cost.holding import Holdings, collect
from meshwright.cost.layouts import Backward, Kind, LayoutArrays
from meshwright.cost.moments import heaviest_moment
from meshwright.cost.offload import keeps_parameters_away, optimizes_away, overflow
from meshwright.cost.optimizers import Optimized, kept_bytes, step_bytes
from meshwright.cost.pipeline import Shape, held
from meshwright.cost.round_memory import RoundBytes, round_bytes
from meshwright.cost.software import software
from meshwright.cost.states import ZERO1, ZERO2, Local, state_bytes, states, without_parameters
from meshwright.cost.table import IntArray, PlanTable
from meshwright.cost.vocabulary import table_elements
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import NodeGroup
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Embedding, Layer, ModelSpec
from meshwright.spec.report import MemoryPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes of every rank at its peak, shape (rows, ranks): `parts` by MemoryPart on the device, and what it keeps in
    the `host`'s memory at the most."""

    parts: dict[str, FloatArray]
    host: FloatArray


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
    least: bool = False,
) -> Peak:
    """Bytes on every rank shown at the rank's own peak.

    The last of a run of equal ranks, of which only the ends are shown, stands for all behind the first. At the `least`
    it is not known which moment is the peak, and that of most plans is taken.
    """
    at = partial(_at, table, blocks, arrays=arrays, counts=counts, model=model, group=group, job=job, least=least)
    found = at(shape=shape)
    between = _fullest_between(counts, shape=shape)
    if between is None:
        return found
    there = at(shape=replace(shape, rank=between))
    zeros = np.zeros(shape.rank.shape)
    more = sum(there.parts.values(), zeros) > sum(found.parts.values(), zeros)
    parts = {part: np.where(more, there.parts[part], held) for part, held in found.parts.items()}
    return Peak(parts=parts, host=np.where(more, there.host, found.host))


def _at(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    shape: Shape,
    model: ModelSpec,
    group: NodeGroup,
    job: JobSpec,
    least: bool,
) -> Peak:
    """As `memory`, of the ranks that are shown."""
    features, device = software(job.software), group.device
    changed = trained_of(blocks, kinds=arrays.kinds)
    local = _local(table, blocks, changed, arrays=arrays, counts=counts, model=model, job=job)
    state = states(table, local, away=optimizes_away(table), software=features, device=device)
    state = without_parameters(state, keeps_parameters_away(table))
    source = Holdings(
        table=table,
        blocks=blocks,
        arrays=arrays,
        model=model,
        hidden=_hidden_bytes(table, model=model, job=job),
        shared=shared_bytes(table, arrays=arrays, model=model, job=job, device=device, software=features),
        eager=features.eager,
    )
    fixed = fixed_bytes(table, arrays=arrays, counts=counts, model=model, device=device, job=job, software=features)
    entry = collect(source, counts, shape=shape, fixed=fixed)
    met = round_bytes(
        table, local.trained_owned, model=model, largest=partial(_largest_block, local, changed, counts=counts)
    )
    peak = heaviest_moment(
        state,
        entry,
        source,
        counts=counts,
        shape=shape,
        kind=device.kind,
        software=features,
        besides=() if met is None else (met.between(state.after, entry.fixed),),
        least=least,
    )
    passing = partial(_passing_host, table, local, changed, arrays=arrays, counts=counts, model=model)
    host = _on_host(table, blocks, local, counts=counts, shape=shape, passing=passing)
    left = overflow(host, group=group)
    beside = _beside_training(table, local, met, job=job, group=group)
    parts = {
        MemoryPart.PARAMETERS: state.parameters - peak["freed"],
        MemoryPart.GRADIENTS: peak["gradients"],
        MemoryPart.OPTIMIZER: state.optimizer,
        MemoryPart.ACTIVATIONS: peak["activations"] + left,
        MemoryPart.LOGITS: peak["logits"],
        MemoryPart.BUFFERS: np.where(shape.valid, peak["buffers"] + beside, 0.0),
        MemoryPart.RESERVED: np.where(shape.valid, device.reserved_bytes, 0.0),
    }
    return Peak(parts={str(part): held for part, held in parts.items()}, host=host - left)


def _local(
    table: PlanTable,
    blocks: Sequence[Holds],
    changed: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
    job: JobSpec,
) -> Local:
    """Parameters of every rank and what the optimizer keeps of those of `changed` blocks, which are trained."""
    whole = local_parameters(table, blocks, arrays=arrays, counts=counts, model=model)
    trained = local_parameters(table, changed, arrays=arrays, counts=counts, model=model)
    trained_owned = owned_parameters(table, trained, grid_parameters(table, changed, counts=counts))
    among = partial(sharded_as, table=table, arrays=arrays, counts=counts, model=model)
    summed = among([ZERO1], all_=Shared(whole=trained, owned=trained_owned), blocks=changed)
    owned = owned_parameters(table, whole, grid_parameters(table, blocks, counts=counts))
    optimized = Optimized(table=table, arrays=arrays, counts=counts, model=model, spec=job.optimizer)
    return Local(
        whole=whole,
        owned=owned,
        trained=trained,
        trained_owned=trained_owned,
        stays=among([ZERO1, ZERO2], all_=Shared(whole=whole, owned=owned), blocks=blocks).whole,
        summed=summed.whole,
        summed_owned=summed.owned,
        layers=_in_layers(blocks, arrays=arrays, counts=counts),
        moments=kept_bytes(optimized, trained_owned),
        step=step_bytes(optimized),
        left=compression_bytes(optimized, trained_owned),
    )


def _beside_training(
    table: PlanTable, local: Local, met: RoundBytes | None, *, job: JobSpec, group: NodeGroup
) -> FloatArray:
    """What copies in memory and learners that meet keep all the time, shape (rows, ranks)."""
    copies = copied_bytes(table, local.owned, local.moments, job=job, met=met, per_node=group.devices_per_node)
    return copies if met is None else copies + met.travelling + met.kept


def _largest_block(local: Local, blocks: Sequence[Holds], *, counts: Mapping[str, FloatArray]) -> FloatArray:
    """Of `local.trained_owned`, the most that is of one block, shape (rows, ranks)."""
    values = np.stack([block.parameters for block in blocks], axis=1)[:, None, :]
    whole = np.where(counts["total"][..., :-1] > 0, values, 0.0).max(axis=2)
    return np.asarray(whole * local.trained_owned / np.maximum(local.trained, 1.0))


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
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray:
    """Elements of gradients on their way through the host's memory, shape (rows, ranks): of an optimizer there those
    that step together, embeddings or all else; of parameters there those that are added to a block's."""
    apart = [isinstance(kind.block, Embedding) for kind in arrays.kinds]
    rest = [_untrained(block) if alone else block for block, alone in zip(changed, apart, strict=True)]
    whole = local_parameters(table, rest, arrays=arrays, counts=counts, model=model)
    others = owned_parameters(table, whole, grid_parameters(table, rest, counts=counts))
    several = (table.microbatches > 1)[:, None]
    added = np.where(several, _largest_block(local, changed, counts=counts), 0.0)
    return np.where(keeps_parameters_away(table)[:, None], added, np.maximum(others, local.trained_owned - others))


def _away(blocks: Sequence[Holds], *, counts: Mapping[str, FloatArray], shape: Shape) -> FloatArray:
    """Bytes that every rank's microbatches under way keep in the host's memory, shape (rows, ranks)."""
    zeros = np.zeros(shape.valid.shape)
    if not any(np.any(block.bytes.away) for block in blocks):
        return zeros
    each = np.stack([block.bytes.away + np.zeros(len(zeros)) for block in blocks], axis=1)[:, None, :]
    names = ("first", "last", "total")
    return held(shape, **{name: (counts[name][..., :-1] * each).sum(axis=2) for name in names})


def trained_of(blocks: Sequence[Holds], *, kinds: Sequence[Kind]) -> list[Holds]:
    """The blocks as though those that are not trained had no parameters."""
    return [
        block if kind.backward is Backward.WHOLE else _untrained(block)
        for kind, block in zip(kinds, blocks, strict=True)
    ]


def _untrained(block: Holds) -> Holds:
    return _of(block, 0.0)


def _of(block: Holds, share: FloatArray | float) -> Holds:
    """The block as though it had only `share` of its parameters, by row."""
    parameters, experts = block.parameters * share, block.expert_parameters * share
    return _Less(bytes=block.bytes, parameters=parameters, expert_parameters=experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Less:
    bytes: BlockBytes
    parameters: FloatArray
    expert_parameters: FloatArray


def local_parameters(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray:
    """Parameters of every rank after tensor division and before sharding, shape (rows, ranks).

    A tied head away from its embedding holds a copy of the matrix; towers live with the embedding.
    """
    total = counts["total"]
    values = np.stack([block.parameters for block in blocks], axis=1)
    parameters = np.einsum("nrk,nk->nr", total[..., :-1], values)
    copied = _copied_tables(table, blocks, arrays=arrays, counts=counts, model=model)
    parameters = parameters if copied is None else parameters + copied
    embeds = arrays.of(model.embedding, total)
    return np.asarray(parameters + embeds * float(sum(tower.parameters for tower in model.towers)))


def _copied_tables(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray | None:
    """Parameters of tied heads' copies of the matrix, away from their embedding; None where it has none."""
    of_table = next(b for k, b in zip(arrays.kinds, blocks, strict=True) if k.block == model.embedding)
    if not (model.head.tied and of_table.parameters.any()):
        return None
    embeds, heads = (arrays.of(block, counts["total"]) for block in (model.embedding, model.head))
    return np.maximum(heads - embeds, 0.0) * table_elements(model.head, table)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Parameters of every rank that are sharded in one of some ways, shape (rows, ranks): `whole` before it, and those
    `owned` after it."""

    whole: FloatArray
    owned: FloatArray


def sharded_as(
    ways: Sequence[int],
    *,
    all_: Shared,
    table: PlanTable,
    blocks: Sequence[Holds],
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> Shared:
    """Of parameters of every rank, `all_` of which are of `blocks`, those of blocks that are sharded in one of these
    `ways`, indexes into SHARDINGS."""
    if all(kind.sharding is None for kind in arrays.kinds):
        those = np.isin(table.sharding, ways)[:, None]
        return Shared(whole=np.where(those, all_.whole, 0.0), owned=np.where(those, all_.owned, 0.0))
    chosen = [np.isin(kind.rows(table).sharding, ways).astype(np.float64) for kind in arrays.kinds]
    held = [_of(block, share) for block, share in zip(blocks, chosen, strict=True)]
    whole = np.einsum("nrk,nk->nr", counts["total"][..., :-1], np.stack([each.parameters for each in held], axis=1))
    copied = _copied_tables(table, blocks, arrays=arrays, counts=counts, model=model)
    if copied is not None:
        heads = [index for index, kind in enumerate(arrays.kinds) if kind.block == model.head]
        whole = whole + copied * sum(np.where(counts["total"][..., k] > 0, chosen[k][:, None], 0.0) for k in heads)
    return Shared(whole=whole, owned=owned_parameters(table, whole, grid_parameters(table, held, counts=counts)))


def grid_parameters(table: PlanTable, blocks: Sequence[Holds], *, counts: Mapping[str, FloatArray]) -> FloatArray:
    """Of `local_parameters`, those that lie on a grid of experts, shape (rows, ranks)."""
    if not table.on_grid.any():
        return np.zeros(counts["total"].shape[:2])
    values = np.stack([np.where(table.on_grid, block.expert_parameters, 0.0) for block in blocks], axis=1)
    return np.asarray(np.einsum("nrk,nk->nr", counts["total"][..., :-1], values))


def owned_parameters(table: PlanTable, parameters: FloatArray, apart: FloatArray) -> FloatArray:
    """Parameters of every rank after sharding: `apart` are over other ranks than the rest, shape (rows, ranks)."""
    sharded = table.sharding > 0
    dense = np.where(sharded, table.divided, 1)[:, None]
    experts = np.where(sharded, table.expert_divided, 1)[:, None]
    return np.asarray((parameters - apart) / dense + apart / experts)


def sent_parameters(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
) -> FloatArray:
    """What every rank owns of trained parameters, which it sends where it is a learner's; shape (rows, ranks)."""
    changed = trained_of(blocks, kinds=arrays.kinds)
    parameters = local_parameters(table, changed, arrays=arrays, counts=counts, model=model)
    return owned_parameters(table, parameters, grid_parameters(table, changed, counts=counts))


def _in_layers(blocks: Sequence[Holds], *, arrays: LayoutArrays, counts: Mapping[str, FloatArray]) -> FloatArray:
    """Of `local_parameters`, those in layers, shape (rows, ranks)."""
    values = [
        block.parameters * isinstance(kind.block, Layer) for kind, block in zip(arrays.kinds, blocks, strict=True)
    ]
    return np.asarray(np.einsum("nrk,nk->nr", counts["total"][..., :-1], np.stack(values, axis=1)))


def _fullest_between(counts: Mapping[str, FloatArray], *, shape: Shape) -> IntArray | None:
    """For the last of every run of equal ranks the first that adds up gradients while it holds all it ever holds.

    Where the first of a run holds all microbatches at once and the last does not, that rank lies between them: it holds
    nearly as much as the first, and gradients besides. None where no run has one.
    """
    stages = {name: counts[name][..., -1] for name in ("first", "last", "total")}
    most = shape.microbatches[:, None] * stages["total"]
    on = held(shape, **stages) < most
    before = np.roll(shape.rank, 1, axis=1)
    apart = shape.valid & (shape.rank > before + 1) & on & ~np.roll(on, 1, axis=1)
    apart[:, 0] = False
    if not apart.any():
        return None
    for each in (counts[name] for name in ("first", "last", "total")):
        apart &= (each == np.roll(each, 1, axis=1)).all(axis=2)
    if not apart.any():
        return None
    found = np.where(apart, before + 1, shape.rank)
    for _ in range(int((shape.rank - before)[apart].max())):
        early = apart & (held(replace(shape, rank=found), **stages) >= most)
        found = np.where(early, np.minimum(found + 1, shape.rank), found)
    return found


def _hidden_bytes(table: PlanTable, *, model: ModelSpec, job: JobSpec) -> FloatArray:
    """Bytes of one microbatch's hidden features in the precision that multiplies, as one tensor rank holds them."""
    hidden = table.microbatch * job.sequence_length / table.context * model.width * state_bytes(table).compute
    return np.asarray(hidden / table.residual_parts)
