"""Tensor parallel: a table of which dim of which parameter is divided, and the regions that hold divided ones.

Inside a mixer, a transform and the vocabulary's matrices each rank computes with its part of the heads, hidden
features or columns (Megatron-LM, 1909.08053); entering and leaving are the only collectives. With sequence parallel
the residual stream between them is divided along the sequence (2205.05198). Parameters are distributed tensors on
the tensor axis; modules read their local parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from meshwright.cost.vocabulary import rows_of
from meshwright.nn.attention import GroupedAttention
from meshwright.nn.decoder import DecoderLayer, OutputHead, TokenEmbedding
from meshwright.nn.linear import Table
from meshwright.nn.loss import Vocabulary
from meshwright.nn.mixture import MixtureOfExperts
from meshwright.nn.norm import RootMeanSquareNorm
from meshwright.nn.weights import Reader, Weighted
from meshwright.parallel.collectives import (
    EnterReplicated,
    EnterSequence,
    LeaveReplicated,
    LeaveSequence,
    SumShared,
)
from meshwright.parallel.copied_heads import Copied
from meshwright.parallel.shards import as_part
from meshwright.spec.blocks import Attention, Block, LatentAttention, Layer, Mixture, QueryKeyNorm
from meshwright.spec.errors import Problem
from meshwright.spec.model import ModelSpec
from meshwright.spec.ranks import factor_of

# The dim that the tensor axis divides, by parameter name; the first match holds and what matches none is replicated.
_DIVIDED: tuple[tuple[str, int], ...] = (
    ("embedding.tokens.weight", 0),
    ("head.output.*", 0),
    ("layers.*.mixer.query.*", 0),
    ("layers.*.mixer.key.*", 0),
    ("layers.*.mixer.value.*", 0),
    ("layers.*.mixer.sinks", 0),
    ("layers.*.mixer.query_up.weight", 0),
    ("layers.*.mixer.kv_up.weight", 0),
    ("layers.*.mixer.output.weight", 1),
    ("layers.*.transform.experts.gate*", 1),
    ("layers.*.transform.experts.up*", 1),
    ("layers.*.transform.experts.down", 2),
    ("layers.*.dense.gate.*", 0),
    ("layers.*.dense.up.*", 0),
    ("layers.*.dense.down.weight", 1),
    ("layers.*.transform.*gate.*", 0),
    ("layers.*.transform.*up.*", 0),
    ("layers.*.transform.*down.weight", 1),
)
_OF_KEYS: tuple[str, ...] = ("layers.*.mixer.key.*", "layers.*.mixer.value.*", "layers.*.mixer.key_norm.*")
_KV_HEADS = "key-value heads"
_WHOLE: tuple[str, ...] = ("layers.*.transform.shared_gate.weight",)
# What is given out is a sum over the ranks: a bias of it counts once.
_SUMMED: tuple[str, ...] = (
    "layers.*.mixer.output",
    "layers.*.dense.down",
    "layers.*.transform.down",
    "layers.*.transform.shared.down",
    "layers.*.transform.experts",
)
_REGIONS: tuple[str, ...] = ("layers.*.mixer.*", "layers.*.dense.*", "layers.*.transform.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAxis:
    """The tensor axis of one rank; `sequence` says that the residual stream is divided along the sequence, `copied` how
    key-value heads lie of which there are fewer than ranks, by their number."""

    mesh: DeviceMesh
    sequence: bool
    copied: Mapping[int, Copied] = field(default_factory=dict)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def enter(self, x: Tensor) -> Tensor:
        """The whole residual stream, about to meet divided weights."""
        result: Tensor = (EnterSequence if self.sequence else EnterReplicated).apply(x, self.group)
        return result

    def leave(self, x: Tensor) -> Tensor:
        """The residual stream from partial sums."""
        result: Tensor = (LeaveSequence if self.sequence else LeaveReplicated).apply(x, self.group)
        return result

    @property
    def counts_losses(self) -> bool:
        """Losses, which all ranks know alike, are counted here."""
        return self.rank == 0

    def hidden(self, batch: int, length: int, width: int) -> tuple[int, int, int]:
        """The shape of what this rank keeps of features (batch, length, width) between regions."""
        return batch, length // (self.size if self.sequence else 1), width

    def own_tokens(self, x: Tensor) -> Tensor:
        """Of (sequences, ...) those whose losses this rank works on: all."""
        return x

    def partial_over(self, name: str, *, block: Block) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which each rank's gradient of `name` is one summand."""
        if (copied := self.copied_of(name, block=block)) is not None:
            return (copied.among,)
        return (self.group,) if has_partial_gradient(name, block=block, sequence=self.sequence) else ()

    def copied_of(self, name: str, *, block: Block) -> Copied | None:
        """How parameter `name` lies where it is of key-value heads that several ranks hold; None of any other."""
        mixer = block.mixer if isinstance(block, Layer) else None
        if not isinstance(mixer, Attention) or mixer.kv_heads >= self.size:
            return None
        if divided_dim(name, block=block) is None or not any(fnmatchcase(name, pattern) for pattern in _OF_KEYS):
            return None
        assert mixer.kv_heads in self.copied, f"the mesh was built without copies of {mixer.kv_heads} key-value heads"
        return self.copied[mixer.kv_heads]

    def divide(
        self, unit: nn.Module, *, prefix: str, block: Block, apart: Callable[[str], bool], has_grid: bool
    ) -> None:
        """Parameters of `unit` are distributed over the axis, and its modules compute with their local parts."""
        divide_parameters(unit, self, prefix=prefix, block=block, apart=apart)
        divide_regions(unit, self, has_grid=has_grid)

    def reader(self, owner: str) -> Reader:
        """How the module called `owner` reads its distributed parameters."""
        return local_reader(owner, self)

    def vocabulary(self, vocab: int) -> Vocabulary:
        """Which columns of the logits this rank holds."""
        return SplitVocabulary(self.group, offset=rows_of(vocab, tensor=self.size, rank=self.rank)[0])

    def lay_part(self, part: nn.Module) -> None:
        """A stage works on all sequences of a microbatch, as it is."""


def divided_dim(name: str, *, block: Block) -> int | None:
    """The dim of parameter `name` that the tensor axis divides; None when every rank holds it whole."""
    if any(fnmatchcase(name, pattern) for pattern in _WHOLE):
        return None
    if isinstance(block, Layer) and (half := factor_of(name, block.ranks)) is not None:
        dim = divided_dim(f"{half.matrix}.weight", block=block)
        return dim if dim == half.dim else None
    if fnmatchcase(name, "layers.*.mixer.*_norm.weight"):
        mixer = block.mixer if isinstance(block, Layer) else None
        return 0 if isinstance(mixer, Attention) and mixer.qk_norm is QueryKeyNorm.FULL else None
    return next((dim for pattern, dim in _DIVIDED if fnmatchcase(name, pattern)), None)


def has_partial_gradient(name: str, *, block: Block, sequence: bool) -> bool:
    """Each rank's gradient of `name` is one summand: it is held whole where activations are divided."""
    if divided_dim(name, block=block) is not None:
        return False
    return sequence or any(fnmatchcase(name, pattern) for pattern in _REGIONS)


def indivisible(model: ModelSpec, *, tensor: int) -> tuple[Problem, ...]:
    """Every dimension of the model that `tensor` ranks cannot share: evenly, but for a vocabulary, of which the last
    one may have less, and key-value heads, of which several may hold the same."""
    problems = []
    if not rows_of(model.vocab, tensor=tensor, rank=tensor - 1)[1]:
        text = f"vocabulary of {model.vocab} leaves nothing to the last of tensor {tensor}"
        problems.append(Problem(what=text, where=f"{model.name}.embedding", fix="use a smaller degree"))
    for where, what, number in _dimensions(model):
        if number % tensor and not (what == _KV_HEADS and tensor % number == 0):
            text = f"{what} of {number} do not divide by tensor {tensor}"
            problems.append(Problem(what=text, where=f"{model.name}.{where}", fix="use a divisor"))
    return tuple(problems)


def _dimensions(model: ModelSpec) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    for index, layer in enumerate(model.layers):
        if isinstance(layer.mixer, Attention):
            found.append((f"layers[{index}].mixer", _KV_HEADS, layer.mixer.kv_heads))
        if isinstance(layer.mixer, (Attention, LatentAttention)):
            found.append((f"layers[{index}].mixer", "heads", layer.mixer.heads))
        if layer.dense is not None:
            found.append((f"layers[{index}].dense", "hidden features", layer.dense.hidden))
        if layer.transform is not None:
            found.append((f"layers[{index}].transform", "hidden features", layer.transform.hidden))
        if isinstance(layer.transform, Mixture) and layer.transform.shared is not None:
            found.append((f"layers[{index}].transform.shared", "hidden features", layer.transform.shared.hidden))
    return list(dict.fromkeys(found))


def divide_parameters(
    module: nn.Module, axis: TensorAxis, *, prefix: str, block: Block, apart: Callable[[str], bool]
) -> None:
    """Every parameter under `module` is a distributed tensor on the axis, of which this rank keeps its part.

    What lies `apart` by its name is left as it is.
    """
    for path, owner in list(module.named_modules(prefix=prefix)):
        for key, parameter in list(owner.named_parameters(recurse=False)):
            if apart(f"{path}.{key}"):
                continue
            dim = divided_dim(f"{path}.{key}", block=block)
            whole = parameter.detach()
            copied = axis.copied_of(f"{path}.{key}", block=block)
            if dim is None:
                held = as_part(whole, axis.mesh, [Replicate()], of=whole)
            elif copied is not None:
                held = as_part(copied.own(whole, dim), copied.mesh, copied.placements(dim), of=whole)
            else:
                held = as_part(_own(whole, dim, axis), axis.mesh, [Shard(dim)], of=whole)
            setattr(owner, key, nn.Parameter(held))


def _own(whole: Tensor, dim: int, axis: TensorAxis) -> Tensor:
    return whole.chunk(axis.size, dim=dim)[axis.rank].clone(memory_format=torch.contiguous_format)


def divide_regions(unit: nn.Module, axis: TensorAxis, *, has_grid: bool) -> None:
    """`unit` (an embedding, a layer or a head), whose parameters are divided, computes with its own parts of them.

    A head's logits come out divided by vocabulary column. Where experts have a grid of their own, a mixture routes the
    tokens that this rank holds, and its shared branch alone is divided. Modules are replaced here, so this precedes
    sharding.
    """
    if isinstance(unit, DecoderLayer):
        transform = unit.transform
        if has_grid and isinstance(transform, MixtureOfExperts):
            transform = transform.shared
        for region in (unit.mixer, unit.dense, transform):
            if region is not None:
                region.register_forward_pre_hook(_entering(axis))
                region.register_forward_hook(_leaving(axis))
        _split_full_norms(unit.mixer, axis)
    elif isinstance(unit, TokenEmbedding):
        unit.tokens = SplitTable(unit.tokens, axis)
        if axis.sequence and unit.positions is not None:
            unit.positions.register_forward_hook(_own_positions(axis))
    elif isinstance(unit, OutputHead):
        unit.output.register_forward_pre_hook(_entering(axis))


def local_reader(owner: str, axis: TensorAxis) -> Reader:
    """How the module called `owner` reads its distributed parameters.

    A bias that is added before a sum over the ranks is divided by their number first.
    """
    summed = any(fnmatchcase(owner, pattern) for pattern in _SUMMED)

    def read(weight: Tensor) -> Tensor:
        assert isinstance(weight, DTensor), f"a parameter of {owner} is not distributed"
        local: Tensor = weight.to_local()
        return local / axis.size if summed and weight.placements[0].is_replicate() else local

    return read


class SplitTable(Table):
    """Rows of a table of which this rank holds some; others' rows come through the sum that leaves."""

    def __init__(self, whole: Table, axis: TensorAxis) -> None:
        Weighted.__init__(self)
        self.weight = whole.weight
        self.reader = whole.reader
        self.axis = axis
        self.first = rows_of(self.weight.shape[0], tensor=axis.size, rank=axis.rank)[0]

    def forward(self, indexes: Tensor) -> Tensor:
        local = self.read(self.weight)
        own = indexes - self.first
        here = (own >= 0) & (own < len(local))
        rows = functional.embedding(own.clamp(0, len(local) - 1), local)
        return self.axis.leave(rows * here[..., None])


class SplitNorm(RootMeanSquareNorm):
    """A norm over features that the ranks share: their squares are summed across them, those of `copies` once."""

    def __init__(self, whole: RootMeanSquareNorm, axis: TensorAxis, *, copies: int = 1) -> None:
        Weighted.__init__(self)
        self.counted = whole.width * copies
        self.width, self.eps = whole.width, whole.eps
        self.weight, self.reader, self.axis = whole.weight, whole.reader, axis

    def forward(self, x: Tensor) -> Tensor:
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        squares: Tensor = SumShared.apply(work.square().sum(dim=-1, keepdim=True), self.axis.group)
        normed = work * torch.rsqrt(squares / self.counted + self.eps)
        weight = self.weight
        return (normed if weight is None else normed * self.read(weight)).to(x.dtype)


class SplitVocabulary:
    """The columns from `offset` of the vocabulary that this rank of `group` holds (a Vocabulary of nn.loss)."""

    def __init__(self, group: dist.ProcessGroup, *, offset: int) -> None:
        self._group, self.offset = group, offset

    def maximum(self, x: Tensor) -> None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self._group)

    def total(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self._group)


def _split_full_norms(mixer: nn.Module | None, axis: TensorAxis) -> None:
    if not isinstance(mixer, GroupedAttention) or mixer.spec.qk_norm is not QueryKeyNorm.FULL:
        return
    assert mixer.query_norm is not None
    assert mixer.key_norm is not None
    mixer.query_norm = SplitNorm(mixer.query_norm, axis)
    mixer.key_norm = SplitNorm(mixer.key_norm, axis, copies=max(axis.size // mixer.spec.kv_heads, 1))


def _entering(axis: TensorAxis) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (axis.enter(args[0]), *args[1:])

    return hook


def _leaving(axis: TensorAxis) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        return axis.leave(output)

    return hook


def _own_positions(axis: TensorAxis) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.chunk(axis.size, dim=-2)[axis.rank]

    return hook
