"""What peaks of memory are made of: settings that decide how long what lives, and what a backward begins beside."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

from meshwright.cost.bucket_bytes import READ_BYTES, OnTheWay
from meshwright.cost.holding import Held, StageHeld
from meshwright.cost.pipeline import Shape
from meshwright.cost.software import Software
from meshwright.cost.stage_order import in_pairs, in_turns, splits
from meshwright.cost.states import States, state_bytes
from meshwright.cost.synchronize import turns
from meshwright.cost.table import PRECISIONS, SCHEDULES, SHARDINGS, TENSOR_GRIDS, BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.plan import ScheduleKind, Sharding, TensorGrid
from meshwright.spec.synchronize import PACKINGS

T = TypeVar("T")
_BREADTH_FIRST = SCHEDULES.index(ScheduleKind.BREADTH_FIRST)
_ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)
_CUBE = TENSOR_GRIDS.index(TensorGrid.CUBE)
_NARROW = [PACKINGS.get(entry) for entry in PRECISIONS]
_ROUNDED = np.asarray([0.0 if entry is None else entry.block_bytes / entry.elements for entry in _NARROW])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What decides how long what lives, shape (rows, 1). Every slice of one of its `microbatches` counts as one.

    It is `divided` among so many ranks, and experts on a grid among `experts_divided`.
    Bytes of a parameter: `master`, `compute`, `reduced` as it is summed, `rounded` as it travels where that is in fewer
    bits (or 0), and `read` beside one that is read then, `narrow` of a gradient that is widened, `copied` of a matrix's
    own copy, which is gone by then, `gathered` for a pass, and `dropped` when its stage ends. All passes of a stage in
    a row have what is gathered where it is `shared`. Whole gradients are summed until a stage ends where it
    `sums_whole`. The stages of a rank end one after another
    `in_turns`, or one goes down and one up as microbatches go `in_pairs`; the only stage of one that `splits` has
    halves of backwards. A product gives `unsummed` times what a rank keeps of a sum over others, 0 where it keeps all.
    """

    microbatches: FloatArray
    pipeline: FloatArray
    chunks: FloatArray
    in_turns: BoolArray
    in_pairs: BoolArray
    breadth_first: BoolArray
    splits: BoolArray
    sharded: BoolArray
    divided: FloatArray
    experts_divided: FloatArray
    sums_whole: BoolArray
    master: FloatArray
    compute: FloatArray
    reduced: FloatArray
    rounded: FloatArray
    read: FloatArray
    narrow: FloatArray
    copied: FloatArray
    gathered: FloatArray
    shared: BoolArray
    dropped: FloatArray
    unsummed: FloatArray

    @classmethod
    def of(cls, table: PlanTable, *, shape: Shape, software: Software) -> Setting:
        sizes, sharding = state_bytes(table), table.sharding
        sharded, zero3, compute = sharding > 0, sharding == _ZERO3, sizes.compute
        shared = sharded & (turns(table) > 1.0)
        rounded = _ROUNDED[table.gradient_precision]
        narrow = np.where(compute < sizes.master, compute, 0.0)
        found = {
            "microbatches": shape.microbatches * table.slices,
            "pipeline": shape.pipeline,
            "chunks": shape.chunks,
            "in_turns": in_turns(table),
            "in_pairs": in_pairs(table, shape),
            "breadth_first": table.schedule == _BREADTH_FIRST,
            "splits": splits(table),
            "sharded": sharded,
            "divided": np.asarray(table.divided, dtype=np.float64),
            "experts_divided": np.asarray(table.expert_divided, dtype=np.float64),
            "sums_whole": (sharding == _ZERO1) | shared,
            "master": sizes.master,
            "compute": compute,
            "reduced": np.where(rounded > 0.0, sizes.master, sizes.reduced),
            "rounded": rounded,
            "read": np.asarray(READ_BYTES)[table.gradient_precision],
            "narrow": narrow,
            "copied": narrow if software.casts_each_pass else 0.0 * narrow,
            "gathered": np.where(zero3 & ~shared, compute, 0.0),
            "shared": shared,
            "dropped": np.where(sharded & (~zero3 | shared), compute, 0.0),
            "unsummed": np.where(table.tensor_grid == _CUBE, table.side, 0.0),
        }
        return cls(**{name: values[:, None] for name, values in found.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows: their settings, states, what they hold, and what gradients take on their `way`, where some do."""

    setting: Setting
    found: States
    entry: Held
    way: OnTheWay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a backward of `stage` begins beside, shape (rows, ranks): `kept` activations and `logits` of all
    microbatches in flight, its own among them; `gradients`, to which every parameter of experts that are apart adds
    `apart` bytes; `freed` whole parameters of other stages; `sends`, and what `waits` of its activations for a later
    half of it. It `sums` where it adds to gradients that are there, and `ends` its stage. It `follows` a forward where
    as much is held at that one's end. Where microbatches go in pairs one of them is `up` the other stage meanwhile,
    and of parameters that are `done` the gradients are there before. It does not count where it is not `here`.
    """

    stage: StageHeld
    here: BoolArray
    kept: FloatArray
    logits: FloatArray
    gradients: FloatArray
    apart: FloatArray | float
    freed: FloatArray | float
    sends: FloatArray
    waits: FloatArray
    sums: BoolArray
    ends: BoolArray
    follows: BoolArray | None
    up: BoolArray | bool = False
    done: FloatArray | float = 0.0


def taken(value: T, rows: IntArray) -> T:
    """A dataclass with the chosen rows of all its arrays."""
    changed: dict[str, Any] = {}
    for field in fields(value):  # type: ignore[arg-type]
        entry = getattr(value, field.name)
        if isinstance(entry, np.ndarray):
            changed[field.name] = entry.take(rows, axis=0)
        elif is_dataclass(entry):
            changed[field.name] = taken(entry, rows)
    return replace(value, **changed)  # type: ignore[type-var]
