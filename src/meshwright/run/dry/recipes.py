"""Recipes: what an operator gives back on fake tensors, once it is known for such arguments.

torch works the same out from scratch, or from a cache of its own that takes longer than the operator would.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from meshwright.run.dry.torch_compat import FakeTensor, FakeTensorMode, as_fake, fresh_meta, kernels_of, view_on_meta
from meshwright.train.torch_compat import leaves, storage_key

_NEVER = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
)
_PLAIN = (
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_REAL = (torch.Tensor, torch.nn.Parameter)
_NAMESPACES = ("aten", "fsdp")
# Only masks choose as many entries as the data says.
_CHOOSES = torch.ops.aten.index.Tensor
# Where a view begins is told from where its tensor does by all operators but this one, which may be given it.
_STRIDED = torch.ops.aten.as_strided.default


class _Unknown(Exception):
    """An argument that a recipe cannot be told by."""


class Recipes:
    """What operators give back, by their arguments: shapes, strides, types and devices of tensors; for many modes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Recipe | None] = {}

    def run(self, mode: FakeTensorMode, func: Any, args: Any, options: Any, otherwise: Callable[[], Any]) -> Any:
        """What `func` gives back under `mode`; `otherwise` is asked the first time, and always of what no recipe can
        tell."""
        key = _key(mode, func, args, options)
        if key is None:
            return otherwise()
        if key not in self._known:
            result = otherwise()
            steady = _is_steady(func, args) and _key(mode, func, args, options) == key
            self._known[key] = _learnt(mode, func, args, options, result) if steady else None
            return result
        recipe = self._known[key]
        return otherwise() if recipe is None else recipe.make(mode, args, options)

    def known(self, mode: FakeTensorMode, func: Any, args: Any, options: Any) -> Recipe | None:
        """How to make what `func` gives back under `mode`, where that was learnt."""
        key = _key(mode, func, args, options)
        return None if key is None else self._known.get(key)


def _key(mode: FakeTensorMode, func: Any, args: Any, options: Any) -> Hashable | None:
    try:
        # Operators are never freed; to hash one by its value takes as long as all of its arguments.
        told = (*args[:3], len(args)) if func is _STRIDED else args
        key = (id(func), *[_described(mode, value) for value in told])
        return (*key, *[(name, _described(mode, options[name])) for name in options]) if options else key
    except _Unknown:
        return None


def _described(mode: FakeTensorMode, value: Any) -> Hashable:
    kind = type(value)
    if kind is FakeTensor:
        if value.fake_mode is not mode or value.constant is not None:
            raise _Unknown
        return value.dtype, value.shape, value.stride(), value.fake_device
    if kind is tuple or kind is list:
        return kind, tuple([_described(mode, entry) for entry in value])
    if kind in _PLAIN:
        return kind, value
    if kind is torch.Generator:
        return (kind,)
    if kind in _REAL and value.is_meta:
        return kind, value.dtype, value.shape, value.stride()
    raise _Unknown


def _learnt(mode: FakeTensorMode, func: Any, args: Any, options: Any, result: Any) -> Recipe | None:
    """How to make such a result again, tried on these arguments; None where that gives anything else."""
    several = isinstance(result, (tuple, list))
    outputs: Sequence[Any] = result if several else (result,)
    given = {_memory(leaf) for leaf in leaves((args, options)) if isinstance(leaf, torch.Tensor)}
    makers = [_maker(func, output, args, options, given) for output in outputs]
    if not all(makers):
        return None
    # A tuple with names takes its entries apart.
    kind = getattr(type(result), "_make", type(result)) if several else None
    recipe = Recipe(makers=tuple(maker for maker in makers if maker), kind=kind)
    again = recipe.make(mode, args, options)
    pairs = zip(outputs, again if several else (again,), recipe.makers, strict=True)
    same = all(_is_same(one, other, new=isinstance(maker, _Fresh)) for one, other, maker in pairs)
    return recipe if same else None


def _maker(func: Any, output: Any, args: Any, options: Any, given: set[int]) -> Maker | None:
    if output is None or isinstance(output, torch.dtype) or (type(output) is int and not given):
        return _Constant(output)
    if type(output) is not FakeTensor:
        return None
    for place, entry in enumerate(args):
        if entry is output:
            return _Given(place)
    for name, entry in options.items():
        if entry is output:
            return _Named(name)
    if output.is_complex() or output.requires_grad:
        return None
    for place, entry in enumerate(args):
        if type(entry) is FakeTensor and _memory(entry) == _memory(output) and entry.dtype == output.dtype:
            shape, stride, offset = _form(output)
            shift = None if func is _STRIDED else offset - int(entry.storage_offset())
            return _View(place, shape, stride, shift, output.fake_device, dict(output.__dict__))
    if _memory(output) in given:
        return None
    return _Fresh(*_form(output)[:2], output.dtype, output.fake_device, dict(output.__dict__))


def _is_steady(func: Any, args: Any) -> bool:
    """Whether what the operator gives back is told by its arguments alone."""
    if func is _CHOOSES:
        return not any(entry is not None and entry.dtype in (torch.bool, torch.uint8) for entry in args[1])
    return func.namespace in _NAMESPACES and "lift" not in func.name() and not _NEVER.intersection(func.tags)


class Maker(Protocol):
    """Makes one output of an operator from its arguments."""

    def make(self, mode: FakeTensorMode, args: Sequence[Any], options: Mapping[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Constant:
    """What is no tensor."""

    value: object

    def make(self, mode: FakeTensorMode, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        del mode, args, options
        return self.value


@dataclass(frozen=True, slots=True)
class _Given:
    """The argument in this place, which the operator changed."""

    place: int

    def make(self, mode: FakeTensorMode, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        del mode, options
        return args[self.place]


@dataclass(frozen=True, slots=True)
class _Named:
    """The argument of this name, which the operator wrote."""

    name: str

    def make(self, mode: FakeTensorMode, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        del mode, args
        return options[self.name]


@dataclass(frozen=True, slots=True)
class _View:
    """Another look at the memory of the argument in this place, which begins `shift` elements after that one or, where
    that is None, where the fourth argument says."""

    place: int
    shape: torch.Size
    stride: tuple[int, ...]
    shift: int | None
    device: torch.device
    state: dict[str, Any]

    def make(self, mode: FakeTensorMode, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        del options
        given = args[self.place]
        begin = given.storage_offset() + (self.shift or 0)
        if self.shift is None and len(args) > 3:
            begin = args[3]
        meta = view_on_meta(given, self.shape, self.stride, begin)
        return as_fake(meta, mode=mode, device=self.device, state=self.state)


@dataclass(frozen=True, slots=True)
class _Fresh:
    """A new tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    state: dict[str, Any]

    def make(self, mode: FakeTensorMode, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        del args, options
        return as_fake(fresh_meta(self.shape, self.stride, self.dtype), mode=mode, device=self.device, state=self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Makes all outputs of an operator, of which `kind` makes a sequence where it gives back several."""

    makers: tuple[Maker, ...]
    kind: Callable[[list[Any]], Any] | None

    def make(self, mode: FakeTensorMode, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        if self.kind is None:
            return self.makers[0].make(mode, args, options)
        return self.kind([maker.make(mode, args, options) for maker in self.makers])


def _memory(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _is_same(one: Any, other: Any, *, new: bool) -> bool:
    """Whether two outputs are alike in all that a fake tensor has, memory of their own apart."""
    if type(one) is not FakeTensor:
        return bool(one == other)
    return (new or _memory(one) == _memory(other)) and _facts(one) == _facts(other)


def _facts(tensor: FakeTensor) -> tuple[object, ...]:
    size = tensor.untyped_storage().nbytes()
    return *_form(tensor), tensor.dtype, tensor.fake_device, size, kernels_of(tensor)
