"""Holdings: which part of every tensor of a run's state each process holds under a plan, without torch.

`parallel` lays parameters and `parallel.optimizer` their state by the same rules; a test holds the two against each
other on every rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import add, ge, le, sub
from types import MappingProxyType

from meshwright.cost.grid_places import Dims, divided_dims
from meshwright.spec.blocks import Block
from meshwright.spec.cluster import Precision
from meshwright.spec.optimizer import Adafactor, Master, Moments, Muon, Optimizer, OptimizerSpec, Sgd, treatment
from meshwright.spec.plan import AxisName, BlockGroup, Design, Plan, Sharding, Stage, TensorGrid
from meshwright.spec.tensors import ParameterTensor, prefix, states, tensors

PARAMETERS, OPTIMIZER = "model.", "optimizer."
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
)
TABLE = "embedding.tokens.weight"
_NO_SPARES: Mapping[int, Box] = MappingProxyType({})


class Contents(StrEnum):
    """What of a run's state is meant: parameters and buffers, or the optimizer's state too."""

    PARAMETERS = "parameters"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class Box:
    """Elements [start, start + size) of every dim of a tensor; of a scalar the one there is."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def meet(self, other: Box) -> Box | None:
        """What both have; None where that is nothing."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = map(min, self.stops, other.stops)
        sizes = tuple(map(sub, stops, starts))
        return Box(starts, sizes) if not sizes or min(sizes) > 0 else None

    def holds(self, other: Box) -> bool:
        """Whether it has all of `other`."""
        return all(map(le, self.starts, other.starts)) and all(map(ge, self.stops, other.stops))

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(map(add, self.starts, self.sizes))

    def cut(self, dim: int, *, index: int, ways: int) -> Box:
        """Share `index` of `ways` equal ones along `dim`; the last have less or nothing where it does not divide."""
        size = self.sizes[dim]
        each = -(-size // ways)
        first = min(index * each, size)
        return self.along(dim, first=first, size=min(each, size - first))

    def along(self, dim: int, *, first: int, size: int) -> Box:
        """Its elements [first, first + size) along `dim`, counted from its own start."""
        starts = (*self.starts[:dim], self.starts[dim] + first, *self.starts[dim + 1 :])
        return Box(starts, (*self.sizes[:dim], size, *self.sizes[dim + 1 :]))

    def without(self, dim: int) -> Box:
        return Box((*self.starts[:dim], *self.starts[dim + 1 :]), (*self.sizes[:dim], *self.sizes[dim + 1 :]))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One tensor: the part that each process has, where it has any; `spares` are parts of processes that are gone, of
    which another one keeps a copy beside its own.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[int, Box]
    spares: Mapping[int, Box] = field(default_factory=lambda: _NO_SPARES)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def boxes(self) -> tuple[tuple[int, Box], ...]:
        """Every part and every spare, with the process that has it."""
        return (*self.parts.items(), *self.spares.items())

    def of(self, process: int) -> tuple[Box, ...]:
        """What `process` has: its part and its spare, where it has them."""
        return tuple(side[process] for side in (self.parts, self.spares) if process in side)


def holdings(
    design: Design, *, contents: Contents = Contents.TRAINING, processes: Sequence[int] | None = None
) -> dict[str, Holding]:
    """Every tensor of the state by its name in the whole model, as `parallel.portable` names it.

    Rank r of the plan is process `processes[r]`; None numbers processes as the plan numbers ranks. What rounding leaves
    of gradients in eight bits is of one plan and one rank, and is left out; moments of one byte are told as what they
    stand for.
    """
    made = _made(design, processes)
    found = {f"{PARAMETERS}{name}": holding for name, holding in made.found.items()}
    if contents is Contents.TRAINING:
        for name, holding in made.found.items():
            if name not in made.untrained:
                kept = state_of(holding, rule=treatment(design.job.optimizer, name).rule, places=made.places[name])
                found |= {f"{OPTIMIZER}{name}.{key}": value for key, value in kept.items()}
    return found


def trained(design: Design, *, processes: Sequence[int] | None = None) -> dict[str, Holding]:
    """Every parameter that training changes, by its name in the whole model; processes as of `holdings`."""
    made = _made(design, processes)
    return {name: holding for name, holding in made.found.items() if name not in made.untrained}


def _made(design: Design, processes: Sequence[int] | None) -> _Maker:
    made = _Maker(design, tuple(range(design.plan.world_size)) if processes is None else tuple(processes))
    for stage in design.plan.stages:
        made.add_stage(stage)
    return made


def state_of(parameter: Holding, *, rule: Optimizer, places: Mapping[int, Box]) -> dict[str, Holding]:
    """What `rule` keeps of one parameter, by field; `places` are its parts with the empty ones.

    AdamW does not count the steps of an empty part, so that what stands there is of no use; Adafactor does.
    """
    step = Holding(shape=(), dtype="float32", parts=dict.fromkeys(parameter.parts, Box((), ())))
    if isinstance(rule, OptimizerSpec):
        moment = replace(parameter, dtype=_moment_dtype(rule, parameter.dtype))
        return {"step": step, "exp_avg": moment, "exp_avg_sq": moment}
    if isinstance(rule, Muon):
        return {"momentum": parameter}
    if isinstance(rule, Sgd):
        return {"momentum": parameter} if rule.momentum else {}
    assert isinstance(rule, Adafactor)
    counted = replace(step, parts=dict.fromkeys(places, Box((), ())))
    if len(parameter.shape) < 2:
        return {"step": counted, "square": parameter}
    last = len(parameter.shape) - 1
    return {
        "step": counted,
        "row": _without(parameter, last, places=places),
        "column": _without(parameter, last - 1, places=places),
    }


def _moment_dtype(rule: OptimizerSpec, dtype: str) -> str:
    if rule.state is Moments.BF16:
        return "bfloat16"
    return "float32" if dtype == "bfloat16" else dtype


def _without(parameter: Holding, dim: int, *, places: Mapping[int, Box]) -> Holding:
    """Means over `dim`: those who have nothing of the parameter may have all of its means."""
    shape = (*parameter.shape[:dim], *parameter.shape[dim + 1 :])
    return replace(parameter, shape=shape, parts=_filled({p: box.without(dim) for p, box in places.items()}))


def _filled(places: Mapping[int, Box]) -> dict[int, Box]:
    return {process: box for process, box in places.items() if box.elements}


def digest(held: Mapping[str, Holding]) -> str:
    """Twelve hex digits that name what is held by whom."""
    made = hashlib.sha256()
    for name, one in sorted(held.items()):
        parts = [(process, box.starts, box.sizes) for process, box in sorted(one.boxes, key=_place)]
        made.update(repr((name, one.shape, one.dtype, parts)).encode())
    return made.hexdigest()[:12]


def _place(entry: tuple[int, Box]) -> tuple[int, tuple[int, ...]]:
    process, box = entry
    return process, box.starts


_Parts = tuple[Mapping[int, Box], Mapping[int, Box]]  # with the empty ones, and without


class _Maker:
    """Parameters and buffers of one design as they are found; tensors that lie alike share their parts."""

    def __init__(self, design: Design, processes: tuple[int, ...]) -> None:
        self._model, self._plan, self._processes = design.model, design.plan, processes
        wide = "float64" if design.plan.first_group.precision is Precision.FP64 else "float32"
        self._dtype = wide if design.job.master is Master.FP32 else "bfloat16"
        self._places = _places(design.plan)
        self._known: dict[tuple[object, ...], _Parts] = {}
        self.found: dict[str, Holding] = {}
        self.places: dict[str, Mapping[int, Box]] = {}
        self.untrained: set[str] = set()

    def add_stage(self, stage: Stage) -> None:
        for index in range(stage.start, stage.stop):
            block = self._model.blocks[index]
            before = prefix(block, index)
            if index in self._plan.frozen_blocks:
                self.untrained.update(before + entry.name for entry in tensors(block))
            for entry in tensors(block):
                self._add(before + entry.name, entry, stage, index=index)
            for state in states(block):
                self.untrained.add(before + state.name)
                self._add(before + state.name, _Entry(shape=state.shape), stage, index=index)
        if self._model.head.tied and stage.stop == len(self._model.blocks) and stage.start > 0:
            self._add(TABLE, tensors(self._model.embedding)[0], stage, index=0)

    def _add(self, name: str, entry: _Entry | ParameterTensor, stage: Stage, *, index: int) -> None:
        """An `entry` of block `index`; what a stage has of a block that is not its own lies as its last group does."""
        block = self._model.blocks[index]
        ranks = [rank for rank, place in enumerate(self._places) if place.stage == stage.rank]
        dims = self._dims(name, entry, block)
        copies = 1
        if isinstance(entry, ParameterTensor) and self._plan.tensor_grid is TensorGrid.LINE:
            copies = entry.copies(self._plan.tensor)
        group = next((group for group in stage.groups if group.start <= index < group.stop), stage.groups[-1])
        places, parts = self._parts(entry, group, ranks, dims=dims, copies=copies)
        before = self.found.get(name)
        if before is not None:
            places, parts = {**self.places[name], **places}, {**before.parts, **parts}
        self.found[name] = Holding(shape=entry.shape, dtype=self._dtype, parts=parts)
        self.places[name] = places

    def _dims(self, name: str, entry: _Entry | ParameterTensor, block: Block) -> Dims:
        """Of each direction along which tensor ranks stand the dim of the parameter that it divides."""
        if isinstance(entry, _Entry):
            return ()
        if self._plan.tensor_grid is TensorGrid.LINE:
            return (entry.divided,)
        return divided_dims(name, block=block, grid=self._plan.tensor_grid)

    def _parts(
        self, entry: _Entry | ParameterTensor, group: BlockGroup, ranks: list[int], *, dims: Dims, copies: int
    ) -> _Parts:
        divides = group.sharding is not Sharding.NONE and not isinstance(entry, _Entry)
        shards = (self._plan.shard if group.shards is None else group.shards) if divides else 0
        gridded = self._plan.experts is not None and isinstance(entry, ParameterTensor) and entry.grid
        key = (entry.shape, dims, copies, gridded, shards, ranks[0])
        if key not in self._known:
            boxes = {}
            for rank in ranks:
                place = self._places[rank]
                boxes[self._processes[rank]] = (
                    _on_grid(entry.shape, dims, place=place, plan=self._plan, shards=divides)
                    if gridded
                    else _dense(entry.shape, dims, copies=copies, place=place, plan=self._plan, shards=shards)
                )
            self._known[key] = boxes, _filled(boxes)
        return self._known[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What no axis divides."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a rank stands: its pipeline rank, its data parallel and its context rank, along each direction of the
    tensor ranks, and on the grid of experts its shard, expert and tensor rank."""

    stage: int
    data: int
    context: int
    tensor: tuple[int, ...]
    grid: tuple[int, int, int]


def _places(plan: Plan) -> list[_Place]:
    held, found, count = grid_of(plan), [], dict[int, int]()
    for rank in range(plan.world_size):
        place, left = dict[AxisName, int](), rank
        for axis in reversed(plan.axes):
            left, place[axis.name] = divmod(left, axis.size)
        stage = place.get(AxisName.PIPELINE, 0)
        # Ranks of one stage stand on the grid of experts in ascending order.
        inside = count.get(stage, 0)
        count[stage] = inside + 1
        inside, slice_ = divmod(inside, held[2])
        inside, expert = divmod(inside, held[1])
        found.append(
            _Place(
                stage=stage,
                data=place.get(AxisName.REPLICATE, 0) * plan.shard + place.get(AxisName.SHARD, 0),
                context=place.get(AxisName.CONTEXT, 0),
                tensor=_directions(place.get(AxisName.TENSOR, 0), plan),
                grid=(inside % held[0], expert, slice_),
            )
        )
    return found


def grid_of(plan: Plan) -> tuple[int, int, int]:
    """Shards, experts and tensor ranks on the grid of experts of a stage; ones where there is no grid."""
    if plan.experts is None:
        return 1, 1, 1
    expert, tensor = plan.experts.expert, plan.experts.tensor
    return max(plan.shard * plan.context * plan.tensor // (expert * tensor), 1), expert, tensor


def _directions(tensor: int, plan: Plan) -> tuple[int, ...]:
    """A tensor rank's place along each direction of its line, square or cube, the last varying fastest."""
    side, found = plan.tensor_grid.side(plan.tensor), []
    for _ in range(plan.tensor_grid.dims):
        tensor, place = divmod(tensor, side)
        found.append(place)
    return tuple(reversed(found))


def _shard_of(place: _Place, plan: Plan, *, shards: int) -> int:
    """Which part of what shard and context ranks divide as one axis: that of the two which the plan names last varies
    fastest in it."""
    names = [axis.name for axis in plan.axes if axis.name in (AxisName.SHARD, AxisName.CONTEXT)]
    if names == [AxisName.CONTEXT, AxisName.SHARD]:
        return place.context * shards + place.data % shards
    return place.data % shards * plan.context + place.context


def _dense(shape: tuple[int, ...], dims: Dims, *, copies: int, place: _Place, plan: Plan, shards: int) -> Box:
    """The part of a rank; `copies` tensor ranks in a row have the same, and `shards` data parallel ranks divide it, 0
    where none do."""
    box, side = whole(shape), plan.tensor_grid.side(plan.tensor)
    for dim, index in zip(dims, place.tensor, strict=False):
        if dim is not None:
            box = box.cut(dim, index=index // copies, ways=side // copies)
    if not shards:
        return box
    return box.cut(0, index=_shard_of(place, plan, shards=shards), ways=shards * plan.context)


def _on_grid(shape: tuple[int, ...], dims: Dims, *, place: _Place, plan: Plan, shards: bool) -> Box:
    ways, experts, slices = grid_of(plan)
    shard, expert, slice_ = place.grid
    box = whole(shape).cut(0, index=expert, ways=experts)
    if dims[0] is not None:
        box = box.cut(dims[0], index=slice_, ways=slices)
    if not shards or ways == 1:
        return box
    dim = next((dim for dim, size in enumerate(box.sizes) if size % ways == 0), 0)
    return box.cut(dim, index=shard, ways=ways)
