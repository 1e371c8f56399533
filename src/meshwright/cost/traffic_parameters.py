"""Parameters as one rank holds them: which tensors travel together, how much of them is its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.cost.grid_places import Role, role_of
from meshwright.cost.traffic_groups import GridGroups, Group, Sharers, along, sharers
from meshwright.spec.blocks import Block, Embedding, Layer
from meshwright.spec.plan import AxisName, Design, Plan, Sharding, TensorGrid
from meshwright.spec.tensors import ParameterTensor, prefix, tensors

_REGIONS = (".mixer.", ".dense.", ".transform.")
_POSITIONS = "embedding.positions.weight"
# The dim of a stacked parameter that `expert_tensor` divides; what is not here is whole on each of its ranks.
EXPERT_DIMS = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """`dim`, of `extent` elements before this cut, is divided over a group in runs of equal length; the last ranks
    have less where it does not divide."""

    dim: int
    extent: int
    group: Group

    def length(self, rank: int) -> int:
        """Elements that `rank` of the group has."""
        each = -(-self.extent // self.group.size)
        return max(0, min(each, self.extent - rank * each))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One parameter on this rank. `name` is the whole model's. `cuts`, the last one first, made `shape` of the whole;
    `shard` is the one of them that sharding made. `early` where its gradient comes with the input's, `trained` where it
    has one. `repeats`, on a square or cube of tensor ranks, counts the directions along which its gradient is summed;
    so many `copies` of it do tensor ranks on a line have, among whom it is summed too.
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    shard: Cut | None = None
    grid: bool = False
    whole: bool = True
    early: bool = False
    trained: bool = True
    repeats: int | None = None
    copies: int = 1

    @property
    def size(self) -> int:
        """Elements of this rank's own."""
        return math.prod(self.shape)

    @property
    def padded(self) -> int:
        """Elements of all shards, each as large as the first."""
        return self.size * (self.shard.group.size if self.shard else 1)

    def cut(self, dim: int, group: Group) -> Part:
        """Divided once more."""
        if group.size == 1:
            return self
        made = Cut(dim=dim, extent=self.shape[dim], group=group)
        shape = (*self.shape[:dim], made.length(0), *self.shape[dim + 1 :])
        return replace(self, shape=shape, cuts=(made, *self.cuts))

    def sharded(self, dim: int, group: Group) -> Part:
        found = self.cut(dim, group)
        return replace(found, shard=found.cuts[0] if group.size > 1 else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered and reduced together, among `sharers`. `block` is whose they are, None of what a
    stage with a tied head leaves; `experts` where they are a grid's."""

    parts: tuple[Part, ...]
    sharers: Sharers
    block: int | None = None
    experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one stage holds: `units` that are sharded, and parameters that are whole: `dense` ones, which all data
    parallel ranks hold alike, and `apart` those of experts on a grid."""

    units: tuple[Unit, ...]
    dense: tuple[Part, ...]
    apart: tuple[Part, ...]

    @property
    def parts(self) -> Iterator[Part]:
        for unit in self.units:
            yield from unit.parts
        yield from self.dense
        yield from self.apart


def is_sharded(design: Design) -> bool:
    plan = design.plan
    return plan.first_group.sharding is not Sharding.NONE and plan.shard * plan.context > 1


def held(design: Design, index: int, *, grid: GridGroups | None) -> Held:
    """The parameters of stage `index` on the first rank of it."""
    model, plan, stage = design.model, design.plan, design.plan.stages[index]
    sharded, end = is_sharded(design), sharers(plan, stage.groups[-1].shards)
    last = len(plan.stages) - 1
    tied = model.head.tied and index == last
    units: list[Unit] = []
    dense: list[Part] = []
    apart: list[Part] = []
    left: list[Part] = []
    for block in range(stage.start, stage.stop):
        entry = model.blocks[block]
        found = [_divided(part, design, grid=grid, block=entry) for part in _whole(design, block)]
        experts = tuple(part for part in found if part.grid)
        if experts and sharded and grid is not None and grid.shards.size > 1:
            places = tuple(part.sharded(_dim_of_shards(part, grid.shards.size), grid.shards) for part in experts)
            same = Sharers(shards=grid.shards, replicas=grid.replicas)
            units.append(Unit(parts=places, sharers=same, block=block, experts=True))
        else:
            apart += experts
        own = [part for part in found if not part.grid]
        if not sharded:
            dense += own
        elif tied and not isinstance(model.blocks[block], Layer):
            left += [part.sharded(0, end.shards) for part in own]
        elif own:
            among = sharers(plan, plan.group_of(block).shards)
            units.append(Unit(parts=tuple(part.sharded(0, among.shards) for part in own), sharers=among, block=block))
    if tied and index > 0:
        table = _divided(_table(design), design, grid=grid, block=model.embedding)
        left += [table.sharded(0, end.shards)] if sharded else []
        dense = dense if sharded else [table, *dense]
    if left:
        units.append(Unit(parts=tuple(left), sharers=end))
    return Held(units=tuple(units), dense=tuple(dense), apart=tuple(apart))


def _whole(design: Design, block: int) -> Iterator[tuple[Part, ParameterTensor]]:
    entry = design.model.blocks[block]
    for tensor in tensors(entry):
        name = prefix(entry, block) + tensor.name
        table = isinstance(entry, Embedding)
        early = table or not tensor.is_matrix or name.endswith("bias")
        trained = block not in design.plan.frozen_blocks
        yield Part(name=name, shape=tensor.shape, early=early, trained=trained), tensor


def _table(design: Design) -> tuple[Part, ParameterTensor]:
    """A tied head's own copy of the table, which it multiplies with."""
    entry = tensors(design.model.embedding)[0]
    trained = 0 not in design.plan.frozen_blocks
    return Part(name=prefix(design.model.embedding, 0) + entry.name, shape=entry.shape, trained=trained), entry


def _divided(found: tuple[Part, ParameterTensor], design: Design, *, grid: GridGroups | None, block: Block) -> Part:
    """Of `block`, as the tensor axis or the grid of experts divides it."""
    part, tensor = found
    if tensor.grid and grid is not None:
        dim = EXPERT_DIMS.get(tensor.name.rsplit(".", 1)[-1])
        part = replace(part, grid=True, whole=False)
        sliced = part if dim is None else part.cut(dim, grid.slices)
        return sliced.cut(0, grid.experts)
    if design.plan.tensor_grid is not TensorGrid.LINE and design.plan.tensor > 1:
        return _on_square_or_cube(part, design.plan, block=block)
    if tensor.divided is None or design.plan.tensor == 1:
        return part
    axis, copies = along(design.plan, AxisName.TENSOR), tensor.copies(design.plan.tensor)
    cut = part.cut(tensor.divided, replace(axis, size=axis.size // copies))
    return replace(cut, whole=False, copies=copies)


def _on_square_or_cube(part: Part, plan: Plan, *, block: Block) -> Part:
    """Matrices are divided along both dims, rows twice on a cube; what lies along features in one direction; norms of
    one head are whole."""
    dims = plan.tensor_grid.dims
    side = Group(axes=(AxisName.TENSOR,), size=plan.tensor_grid.side(plan.tensor))
    if role_of(part.name, block=block) is Role.HEAD:
        return replace(part, repeats=dims)
    if len(part.shape) == 1 or part.name == _POSITIONS:
        return replace(part.cut(len(part.shape) - 1, side), repeats=dims - 1)
    for dim in (0, 1, 0)[:dims]:
        part = part.cut(dim, side)
    return replace(part, repeats=0)


def _dim_of_shards(part: Part, shards: int) -> int:
    """Whole experts where the ranks can share them, else features."""
    return next((dim for dim, size in enumerate(part.shape) if size % shards == 0), 0)


def summands(part: Part, *, sequence: bool) -> int:
    """How often tensor ranks sum its gradient, of which each has a summand: it is whole where activations are
    divided."""
    if not part.trained:
        return 0
    if part.repeats is not None:
        return part.repeats
    return part.copies > 1 or (part.whole and (sequence or any(region in part.name for region in _REGIONS)))


def buckets(parts: Sequence[Part], *, each: float, most: float) -> list[list[Part]]:
    """The buckets that gradients of `each` bytes an element lie in, from the last one of the stage on."""
    found: list[list[Part]] = []
    size = 0.0
    for part in reversed(parts):
        if not found or size + part.size * each > most:
            found.append([])
            size = 0.0
        found[-1].append(part)
        size += part.size * each
    return found
