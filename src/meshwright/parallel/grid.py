"""Tensor parallel over a square or a cube of ranks: how parameters lie on it, and the modules that compute there.

A square (Optimus, 2104.05343) divides sequences over its rows and features over its columns; a cube (2105.14450)
divides the residual stream's sequences over `depth` and then `inner`, its features over `outer`, and inside mixers and
transforms the other way round. Parameters are distributed tensors on the grid, so that saving, moving, clipping and
optimizers know them as any others; modules read their local parts, and products over the grid are Weighted's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from meshwright.cost.grid import undivided
from meshwright.cost.grid_places import Role, divided_dims
from meshwright.nn.attention import GroupedAttention
from meshwright.nn.decoder import Decoder, DecoderLayer, OutputHead, Projection, TokenEmbedding
from meshwright.nn.linear import Linear, Table
from meshwright.nn.loss import Vocabulary
from meshwright.nn.norm import LayerNorm, RootMeanSquareNorm
from meshwright.nn.weights import Reader, Weighted
from meshwright.parallel.collectives import SumShared
from meshwright.parallel.grid_products import GatherRows, ScatterRows, SquareProducts, SquareRows, SquareTurned
from meshwright.parallel.tensor import SplitVocabulary, TensorAxis
from meshwright.spec.blocks import Attention, Block, FeedForward, QueryKeyNorm
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design, TensorGrid


def misplaced(design: Design) -> tuple[Problem, ...]:
    """Every reason why the tensor ranks of the plan cannot lie on its grid; () when they can."""
    plan, grid = design.plan, design.plan.tensor_grid
    if grid is TensorGrid.LINE:
        return ()
    side, where = grid.side(plan.tensor), "plan.tensor_grid"
    if plan.tensor == 1 or side**grid.dims != plan.tensor:
        what = f"{plan.tensor} tensor ranks are no {grid.value}"
        return (Problem(what=what, where=where, fix="choose line"),)
    found = [what for _, what in undivided(design.model, grid=grid, side=side)]
    if plan.microbatch % grid.token_parts(plan.tensor):
        found.append(f"{plan.microbatch} sequences of a microbatch do not divide in {grid.token_parts(plan.tensor)}")
    if plan.context > 1 or plan.schedule.slices > 1 or plan.first_group.sequence_parallel or plan.experts is not None:
        found.append(f"a {grid.value} of tensor ranks takes whole sequences and no experts")
    if plan.frozen_blocks:
        found.append(f"a {grid.value} of tensor ranks trains every block")
    parts = [part for layer in design.model.layers for part in layer.parts]
    if not all(isinstance(part, (Attention, FeedForward)) for part in parts):
        found.append(f"only attention and feed-forwards lie on a {grid.value}")
    return tuple(Problem(what=what, where=where, fix="choose line") for what in dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """The square or cube of tensor ranks that this rank stands in, by the directions of its mesh: rows and columns, or
    `inner`, `outer` and `depth`."""

    kind: TensorGrid
    mesh: DeviceMesh

    sequence = False

    @property
    def side(self) -> int:
        return self.mesh.size(0)

    @property
    def size(self) -> int:
        return self.mesh.size()

    def place(self, direction: int) -> int:
        """This rank's coordinate along a direction of the grid."""
        return self.mesh.get_local_rank(direction)

    def along(self, direction: int) -> dist.ProcessGroup:
        """The ranks that differ from this one along a direction of the grid."""
        return self.mesh.get_group(direction)

    @property
    def inside(self) -> dist.ProcessGroup:
        """The ranks that share the features of a region, heads or columns of the vocabulary, of the same tokens."""
        return self.along(1 if self.kind is TensorGrid.SQUARE else 0)

    @property
    def residual(self) -> dist.ProcessGroup:
        """The ranks that share the features of the residual stream of the same tokens."""
        return self.along(1)

    @property
    def counts_losses(self) -> bool:
        """Losses of this rank's tokens are counted here, and not on a rank that shares their vocabulary."""
        return self.inside.rank() == 0

    def hidden(self, batch: int, length: int, width: int) -> tuple[int, int, int]:
        """The shape of what this rank keeps of features (batch, length, width) between regions."""
        return batch // self.side ** (self.kind.dims - 1), length, width // self.side

    def own_tokens(self, x: Tensor) -> Tensor:
        """Of (sequences, ...) those whose heads and losses this rank works on."""
        if self.kind is TensorGrid.SQUARE:
            return x.chunk(self.side)[self.place(0)]
        return x.chunk(self.side)[self.place(2)].chunk(self.side)[self.place(1)]

    def looked_up(self, x: Tensor) -> Tensor:
        """Of (sequences, ...) those that this rank looks up in the table: on a cube for all ranks of `inner`."""
        return x.chunk(self.side)[self.place(0 if self.kind is TensorGrid.SQUARE else 2)]

    def placements(self, name: str, *, block: Block) -> tuple[Placement, ...]:
        """How parameter `name` of `block` lies on the grid's directions."""
        dims = divided_dims(name, block=block, grid=self.kind)
        return tuple(Replicate() if dim is None else Shard(dim) for dim in dims)

    def partial_over(self, name: str, *, block: Block) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which each rank's gradient of `name` is one summand: where it is repeated, tokens differ."""
        places = self.placements(name, block=block)
        return tuple(self.along(index) for index, place in enumerate(places) if place.is_replicate())

    def divide(
        self, unit: nn.Module, *, prefix: str, block: Block, apart: Callable[[str], bool], has_grid: bool
    ) -> None:
        """Parameters of `unit` are distributed over the grid, and its modules compute with their local parts."""
        assert not has_grid, "experts on a grid of their own are refused beside a grid of tensor ranks"
        for path, owner in list(unit.named_modules(prefix=prefix)):
            for key, parameter in list(owner.named_parameters(recurse=False)):
                places = self.placements(f"{path}.{key}", block=block)
                held = DTensor.from_local(self._own(parameter.detach(), places), self.mesh, places, run_check=False)
                setattr(owner, key, nn.Parameter(held))
        _lay_unit(unit, self)

    def reader(self, _owner: str) -> Reader:
        """How modules read their distributed parameters."""
        return _local

    def vocabulary(self, vocab: int) -> Vocabulary:
        group = self.inside
        return SplitVocabulary(group, offset=group.rank() * (vocab // self.side))

    def lay_part(self, part: Decoder) -> None:
        """A stage takes all sequences of a microbatch and works on its own."""
        part.register_forward_pre_hook(_cutting(self, embeds=part.embeds), with_kwargs=True)

    def _own(self, whole: Tensor, places: tuple[Placement, ...]) -> Tensor:
        for direction, place in enumerate(places):
            if isinstance(place, Shard):
                whole = whole.chunk(self.side, dim=place.dim)[self.place(direction)]
        return whole.clone(memory_format=torch.contiguous_format)


TensorRanks = TensorAxis | RankGrid  # how this rank and its peers of the tensor axis share the model


class GridProduct:
    """x W^T + b over a grid (a Product of nn.weights): x and what comes out are divided as its module's docstring
    says; `role` is the matrix's."""

    def __init__(self, grid: RankGrid, *, role: Role) -> None:
        self._grid, self._role = grid, role

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self._square(x, weight) if self._grid.kind is TensorGrid.SQUARE else self._cube(x, weight)
        return y if bias is None else y + bias

    def _square(self, x: Tensor, weight: Tensor) -> Tensor:
        row, column = self._grid.along(1), self._grid.along(0)
        if self._role is Role.TABLE:
            turned: Tensor = SquareTurned.apply(x, weight, row, column)
            return turned
        (y,) = SquareProducts.apply(x, row, column, weight)
        return cast(Tensor, y)

    def _cube(self, x: Tensor, weight: Tensor) -> Tensor:
        """Into a region x was gathered when the region was entered, once for all its products."""
        outwards = self._role is Role.OUT_OF
        if outwards:
            x = GatherRows.apply(x, self._grid.along(1))
        y = functional.linear(x, GatherRows.apply(weight, self._grid.along(2)))
        result: Tensor = ScatterRows.apply(y, self._grid.along(0 if outwards else 1))
        return result


class SquareSpread:
    """What several matrices make of one input that lies on a square (a Spread of nn.weights)."""

    def __init__(self, grid: RankGrid) -> None:
        self._grid = grid

    def __call__(self, x: Tensor, modules: Sequence[nn.Module]) -> Iterator[Tensor]:
        held = [module for module in modules if isinstance(module, Linear)]
        assert len(held) == len(modules), "only matrices lie on a square"
        weights = [module.read(module.weight) for module in held]
        made = SquareProducts.apply(x, self._grid.along(1), self._grid.along(0), *weights)
        for y, module in zip(made, held, strict=True):
            yield y if module.bias is None else y + module.read(module.bias)


class GridTable(Table):
    """Rows of a table that lies on a grid, as the residual stream is divided."""

    def __init__(self, whole: Table, grid: RankGrid) -> None:
        Weighted.__init__(self)
        self.weight, self.reader, self.grid = whole.weight, whole.reader, grid

    def forward(self, indexes: Tensor) -> Tensor:
        """(b, s, width) of this rank from the indexes that `RankGrid.looked_up` leaves it."""
        local, grid = self.read(self.weight), self.grid
        if grid.kind is TensorGrid.SQUARE:
            found: Tensor = SquareRows.apply(indexes, local, grid.along(0))
            return found
        rows = GatherRows.apply(local, grid.along(2))
        own = indexes - grid.place(0) * len(rows)
        here = (own >= 0) & (own < len(rows))
        found = functional.embedding(own.clamp(0, len(rows) - 1), rows) * here[..., None]
        result: Tensor = ScatterRows.apply(found, grid.along(0))
        return result


class GridNorm(RootMeanSquareNorm):
    """A root-mean-square norm over features that the ranks of `group` share: their squares are summed across them."""

    def __init__(self, whole: RootMeanSquareNorm, group: dist.ProcessGroup) -> None:
        Weighted.__init__(self)
        self.width, self.eps = whole.width, whole.eps
        self.weight, self.reader, self.group = whole.weight, whole.reader, group

    def forward(self, x: Tensor) -> Tensor:
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = work * torch.rsqrt(_mean_square(work, self.width, self.group) + self.eps)
        return (normed if self.weight is None else normed * self.read(self.weight)).to(x.dtype)


class GridLayerNorm(LayerNorm):
    """A layer norm over features that the ranks of `group` share: sums, then squares of what is left of the mean."""

    def __init__(self, whole: LayerNorm, group: dist.ProcessGroup) -> None:
        Weighted.__init__(self)
        self.width, self.eps = whole.width, whole.eps
        self.weight, self.bias, self.reader, self.group = whole.weight, whole.bias, whole.reader, group

    def forward(self, x: Tensor) -> Tensor:
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        work = work - SumShared.apply(work.sum(dim=-1, keepdim=True), self.group) / self.width
        normed = work * torch.rsqrt(_mean_square(work, self.width, self.group) + self.eps)
        return (normed * self.read(self.weight) + self.read(self.bias)).to(x.dtype)


def _mean_square(x: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
    squares: Tensor = SumShared.apply(x.square().sum(dim=-1, keepdim=True), group)
    return squares / width


def _local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor), "a parameter is not distributed"
    local: Tensor = weight.to_local()
    return local


def _lay_unit(unit: nn.Module, grid: RankGrid) -> None:
    """Products, norms and tables under `unit` are those over the grid."""
    for name, module in list(unit.named_modules()):
        if isinstance(module, Linear):
            role = Role.OUT_OF if name in ("mixer.output", "transform.down") else Role.INTO
            module.product = GridProduct(grid, role=role)
        elif isinstance(module, Projection):
            module.product = GridProduct(grid, role=Role.INTO if module.weight is not None else Role.TABLE)
    if isinstance(unit, DecoderLayer):
        for part in ("mixer_norm", "mixer_post_norm", "transform_norm", "transform_post_norm"):
            setattr(unit, part, _shared_norm(getattr(unit, part), grid.residual))
        mixer = unit.mixer
        if isinstance(mixer, GroupedAttention) and mixer.spec.qk_norm is QueryKeyNorm.FULL:
            mixer.query_norm = _shared_norm(mixer.query_norm, grid.inside)
            mixer.key_norm = _shared_norm(mixer.key_norm, grid.inside)
        regions = [region for region in (mixer, unit.transform) if region is not None]
    elif isinstance(unit, OutputHead):
        unit.norm = _shared_norm(unit.norm, grid.residual)
        regions = [unit.output]
    else:
        assert isinstance(unit, TokenEmbedding), f"{type(unit).__name__} has no place on a grid"
        unit.tokens = GridTable(unit.tokens, grid)
        regions = []
    for region in regions:
        if grid.kind is TensorGrid.CUBE:
            region.register_forward_pre_hook(_gathering(grid))
        elif isinstance(region, Weighted):
            region.spread = SquareSpread(grid)


def _shared_norm(norm: nn.Module | None, group: dist.ProcessGroup) -> Any:
    """`norm` over features that the ranks of `group` share; None where there is none."""
    if isinstance(norm, RootMeanSquareNorm):
        return GridNorm(norm, group)
    return GridLayerNorm(norm, group) if isinstance(norm, LayerNorm) else norm


def _gathering(grid: RankGrid) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (GatherRows.apply(args[0], grid.along(0)), *args[1:])

    return hook


def _cutting(grid: RankGrid, *, embeds: bool) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        beside = {name: kwargs[name] for name in ("documents", "ahead") if kwargs.get(name) is not None}
        kwargs = {**kwargs, **{name: grid.own_tokens(x) for name, x in beside.items()}}
        return ((grid.looked_up(args[0]), *args[1:]) if embeds else args), kwargs

    return hook
