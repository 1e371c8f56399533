"""Bytes that one block leaves on one device for each microbatch in flight, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.cost.backward_bytes import beside_kept
from meshwright.cost.kept import kept_eager
from meshwright.cost.kept_fused import kept_fused
from meshwright.cost.kept_grid import kept_on_grids
from meshwright.cost.kept_part import Kept
from meshwright.cost.kept_slice import going_back
from meshwright.cost.layouts import Backward, Kind
from meshwright.cost.loss_chunks import loss_runs
from meshwright.cost.offload import keeps_away
from meshwright.cost.repeated import Repeated
from meshwright.cost.second_products import operator_outputs
from meshwright.cost.software import Software
from meshwright.cost.states import experts_apart, state_bytes
from meshwright.cost.table import RECOMPUTES, BoolArray, PlanTable
from meshwright.cost.work import FloatArray, PartWork, Sizes
from meshwright.spec.model import Block, Embedding, Head, Layer
from meshwright.spec.plan import Recompute

FULL = RECOMPUTES.index(Recompute.FULL)
SELECTIVE = RECOMPUTES.index(Recompute.SELECTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceBytes:
    """Arrays of shape (rows,), bytes of one block of a kind for one microbatch that comes in slices.

    Of what is kept they have `handed` keys and values on and `joined` those of earlier ones with their own, the `first`
    of them what grows as that; of the last one's own are `unread` by others and kept to be read again. They have `left`
    gradients for those of earlier ones.
    """

    handed: FloatArray
    unread: FloatArray
    joined: FloatArray
    first: FloatArray
    left: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Arrays of shape (rows,), bytes of one block of a kind for one microbatch.

    `kept` for backward under the row's recompute, `away` in the host's memory instead; `working` the most that its
    backward has beside that, with what it computes `again`, and `half` that the earlier half of a split one has;
    `ending` what it has at its last product, `giving` when its experts give the last of their gradients and `given`
    when they have, `mixing` where it comes to the core of a mixer that is not alone and `opening` to the first products
    of that; `waits` is what is left of `kept` between the halves of a split backward; `logits` of the loss; `cast` are
    copies of experts among what a pass keeps or computes again; `gathering` is what backward has when
    a layer's experts are gathered for it, `making` the most that forward has beside what is kept, and `inside` what it
    has while experts multiply; and what it has of `slices`, where rows have any.
    """

    kept: FloatArray
    working: FloatArray
    logits: FloatArray
    half: FloatArray | float = 0.0
    ending: FloatArray | float = 0.0
    giving: FloatArray | float = 0.0
    given: FloatArray | float = 0.0
    mixing: FloatArray | float = 0.0
    opening: FloatArray | float = 0.0
    waits: FloatArray | float = 0.0
    away: FloatArray | float = 0.0
    cast: FloatArray | float = 0.0
    gathering: FloatArray | float = 0.0
    making: FloatArray | float = 0.0
    inside: FloatArray | float = 0.0
    slices: SliceBytes | None = None


AMOUNTS = tuple(field.name for field in fields(BlockBytes) if field.name != "slices")


class Holds(Protocol):
    """What memory reads of a block: bytes of a microbatch, and parameters, some of them on the grid of experts."""

    @property
    def bytes(self) -> BlockBytes: ...

    @property
    def parameters(self) -> FloatArray: ...

    @property
    def expert_parameters(self) -> FloatArray: ...


def block_bytes(
    kind: Kind,
    table: PlanTable,
    sizes: Sizes,
    inverse: npt.NDArray[np.intp],
    *,
    works: tuple[PartWork, ...],
    software: Software,
) -> BlockBytes:
    """What a block of `kind` that does `works` leaves on rows of `table`, whose settings `inverse` finds in `sizes`."""
    block, sizes = kind.block, sizes.times(kind.block.tokens)
    parts = kept_eager(block, sizes, software) if software.eager else kept_fused(block, sizes, software)
    if np.any(np.asarray(sizes.grid_dims) > 1.0):
        parts = kept_on_grids(parts, block, sizes)
    parts = tuple(part.dropping(software.repeats) for part in parts)
    going = going_back(parts, sizes)

    row = partial(_summed, sizes=sizes, inverse=inverse)
    copied = 0.0 if isinstance(block, Embedding) else row(part.copied for part in parts)
    experts = row(part.experts for part in parts)
    apart = np.where(table.sharding > 0, experts * experts_apart(kind.rows(table)), 0.0)
    each = cast_bytes(table, software=software) * table.slices  # every slice casts its own
    cast = apart * each
    copies = np.where(table.sharding == 0, copied * each, 0.0) + cast
    runs = 1.0 if not isinstance(block, Head) else loss_runs(block, software.loss_chunks, sizes.tokens)[inverse]
    trains = kind.backward is Backward.WHOLE
    kept, again = (row(p.saved - (0.0 if trains else p.fed) for p in each) + copies for each in (parts, going))
    full, selective = recomputes(kind, table, FULL), recomputes(kind, table, SELECTIVE)
    entering = (sizes.tokens * width_of(block) * sizes.itemsize / sizes.split)[inverse]
    by_operators = Repeated.SECOND_PRODUCTS in software.repeats
    core = row(part.core for part in parts)
    core = core if not by_operators else _run_again(block, works, sizes, inverse=inverse, inside=kept - entering)
    # A first norm that is not written out in another precision keeps the very tensor that entered.
    again = again - np.where(sizes.composite_norms & (sizes.itemsize < sizes.wide)[inverse], 0.0, entering)
    if kind.backward is Backward.NONE:
        return BlockBytes(kept=0.0 * kept, working=0.0 * kept, logits=0.0 * kept)
    handed = row(part.handed for part in parts)
    held = np.where(full, entering + handed, np.where(selective, kept - core, kept))
    # Copies of weights stay on the device.
    away = np.where(keeps_away(kind, table), held - np.where(full, 0.0, copies), 0.0)
    scores = selective & (not by_operators)
    beside = beside_kept(going, block, sizes, inverse=inverse, again=scores, stays=(away > 0.0) & ~full)
    if trains:
        # One by one the gradients of all experts come before they are one tensor.
        by_one = np.where(sizes.groups_experts[inverse], 0.0, experts)
        beside["ending"] = beside["ending"] + state_bytes(table).compute * by_one
    made = {name: beside.pop(name) for name in ("making", "inside", "going")}
    beside |= _in_experts(beside, made, full=full, entering=entering)
    beside["working"] = beside["working"] + np.where(selective & by_operators, core, 0.0)
    return BlockBytes(
        kept=held - away,
        away=away,
        logits=row(part.logits for part in parts) / runs,
        waits=row(part.waits for part in parts) if trains else 0.0 * kept,
        cast=cast,
        **{name: np.where(full | (away > 0.0), 0.0, made[name]) for name in ("making", "inside")},
        slices=_of_slices(table, row, parts, stays=away == 0.0, full=full, selective=selective),
        # What is away is here, all of it, until its block's backward is done.
        **{name: values + np.where(full, again, 0.0) + away for name, values in beside.items()},
    )


def _run_again(
    block: Block, works: tuple[PartWork, ...], sizes: Sizes, *, inverse: npt.NDArray[np.intp], inside: FloatArray
) -> FloatArray:
    """Bytes that a policy by operators drops of all that a block keeps `inside`: only layers are computed again."""
    if not isinstance(block, Layer):
        return 0.0 * inside
    return np.maximum(inside - operator_outputs(block, works, sizes)[inverse], 0.0)


def _in_experts(
    beside: Mapping[str, FloatArray], made: Mapping[str, FloatArray], *, full: BoolArray, entering: FloatArray
) -> dict[str, FloatArray]:
    """Moments of backward with those of a layer that is computed again, which has the gradient of what it gives."""
    most = np.where(full & (made["making"] > 0.0), made["making"] + entering, 0.0)
    found = {name: np.maximum(beside[name], most) for name in ("working", "half")}
    return found | {"gathering": np.where(full, made["inside"] + entering, made["going"])}


def _summed(values: Iterable[FloatArray | float], *, sizes: Sizes, inverse: npt.NDArray[np.intp]) -> FloatArray:
    total = sizes.zeros
    for value in values:
        total = total + value
    return np.asarray(total[inverse])


def _of_slices(
    table: PlanTable,
    row: Callable[[Iterable[FloatArray | float]], FloatArray],
    parts: Sequence[Kept],
    *,
    stays: BoolArray,
    full: BoolArray,
    selective: BoolArray,
) -> SliceBytes | None:
    """What slices have of a block whose activations stay on the device, if they do."""
    if not (table.slices > 1).any():
        return None
    handed, once = row(part.handed for part in parts), stays & ~(full | selective)
    return SliceBytes(
        handed=np.where(stays, handed, 0.0),
        unread=np.where(selective & stays, handed / np.maximum(table.slices - 1.0, 1.0), 0.0),
        joined=np.where(once, row(part.joined for part in parts), 0.0),
        first=np.where(once, row(part.first for part in parts), 0.0),
        left=row(part.left for part in parts),
    )


def recomputes(kind: Kind, table: PlanTable, policy: int) -> BoolArray:
    """Rows whose plan recomputes this block in that way: only layers are, where backward comes to them."""
    if not isinstance(kind.block, Layer) or kind.backward is Backward.NONE:
        return np.zeros(len(table), dtype=np.bool_)
    return table.recompute == policy if kind.recompute is None else np.full(len(table), kind.recompute == policy)


def cast_bytes(table: PlanTable, *, software: Software) -> FloatArray:
    """Bytes per parameter of the copies that a pass casts of what a rank has whole and multiplies in less precision."""
    sizes = state_bytes(table)
    return np.where((sizes.compute < sizes.master) & software.casts_each_pass, sizes.compute, 0.0)


def width_of(block: Block) -> int:
    """Features of the residual stream that enters it."""
    if isinstance(block, Layer):
        return block.parts[0].width if block.parts else 0
    return block.width
