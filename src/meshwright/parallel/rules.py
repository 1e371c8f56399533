"""Rules: how the matrices of a module that nobody annotated are divided over the tensor axis.

Two rules, after Redco (2310.16355): of two matrices in a row the first is divided by its columns and the second by
its rows; queries, keys and values are divided by columns, which are heads, and what takes their mixture by rows. They
are not read off names: the module's forward runs once on tensors without memory, and a matrix is what its input makes
it. A matrix of whole features is divided by columns on trial, one of divided features by rows. Where a trial meets a
function that needs whole features, it is taken back and the forward runs again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.divided import (
    Deciding,
    Divided,
    Division,
    ImaginedAxis,
    Indivisible,
    Unlike,
    Use,
    divided,
    own,
)
from meshwright.parallel.divided_einsum import with_matrix
from meshwright.parallel.divided_functions import LOOKS, SIZES, Ruled, function_name
from meshwright.parallel.divided_products import multi_head_attention_forward
from meshwright.parallel.own_functions import given_whole
from meshwright.parallel.torch_compat import plain, tree_map
from meshwright.parallel.trace import Example, Given, Stood, backward_of, imagined, without_memory
from meshwright.spec.errors import ConfigError, Problem

_MATRICES = {"linear", "matmul", "mm", "addmm"}


class Layout(StrEnum):
    """Outputs divided, inputs divided, rows of a vocabulary divided, or every rank holds all."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """How one parameter lies: `division` is None where it is whole, and `why` then says why it was not divided.

    `kind` is its name with a star for each number of a run of alike blocks.
    """

    layout: Layout
    kind: str
    division: Division | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The layout of every parameter by its name; of one with several names by the first."""

    ranks: int
    parts: Mapping[str, Parted]

    def layout(self, name: str) -> Layout:
        return self.parts[name].layout

    @property
    def divided(self) -> tuple[str, ...]:
        return tuple(name for name, part in self.parts.items() if part.division is not None)

    def describe(self) -> str:
        """One line for each kind of parameter: its layout, and why it is whole where one asks why."""
        lines = (f"{p.kind}: {p.layout.value}" + (f" ({p.why})" if p.why else "") for p in self.parts.values())
        return "\n".join(dict.fromkeys(lines))


def derive(module: nn.Module, example: Example, *, tensor: int) -> Rules:
    """How `tensor` ranks divide the parameters of `module`, found from one forward of `example` without memory.

    `module` is as it was. Raises ConfigError where its forward does not run on the meta device.
    """
    names = dict(module.named_parameters())
    imagined(module, example, names, after=lambda _output: None)
    trial = _Trial(module=module, ranks=tensor)
    while True:  # each forward learns something or is the last
        try:
            with trial.forward(), given_whole(_closed_by):
                imagined(module, example, trial.opened(names), after=trial.check)
            break
        except Indivisible as conflict:
            trial.learn(conflict)
    trial.extend(names)
    return Rules(ranks=tensor, parts={name: trial.part(name) for name in names})


def undivided(module: nn.Module) -> Rules:
    """What one rank holds of `module`: every parameter, whole."""
    names = dict(module.named_parameters())
    return Rules(ranks=1, parts={name: Parted(layout=Layout.WHOLE, kind=_kind(name, module)) for name in names})


@dataclass(slots=True, kw_only=True)
class _Trial:
    """What is known after the forwards so far, and what is decided in the one at work."""

    module: nn.Module
    ranks: int
    taken_back: dict[str, str] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, frozenset[Fraction]] = field(default_factory=dict)
    rows: set[int] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    used_whole: dict[str, str] = field(default_factory=dict)  # and the function that did
    chosen: dict[str, tuple[Layout, Division]] = field(default_factory=dict)
    stood: Stood = field(init=False)

    def __post_init__(self) -> None:
        self.stood = Stood(self.module)

    def forward(self) -> Stood:
        self.chosen, self.used_whole = {}, {}
        return self.stood

    def opened(self, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _opened(_Open(name=name, trial=self), without_memory(x)) for name, x in names.items()}

    def check(self, output: Any) -> None:
        """Raises Indivisible where what the module returns is divided, or its gradient meets what it cannot."""

        def look(x: Any) -> Any:
            if isinstance(x, Divided):
                raise Indivisible("the module returns it", origins=x.origins)
            return x

        tree_map(look, output)
        for name, function in self.used_whole.items():
            if name in self.chosen:
                raise Indivisible(f"{function} of all of it", origins=frozenset({name}))
        backward_of(output)

    def learn(self, conflict: Indivisible) -> None:
        """Cuts that would help are tried first; then the first of the matrices that divided it is whole: those behind
        may have met divided features only because of it. Of matrices divided in two ways the smallest is whole."""
        origins = {_kind(name, self.module) for name in conflict.origins}
        if not origins:
            where = self.stood.place or "the module"
            raise ConfigError(Problem(what=f"cannot be divided: {conflict.reason}", where=where, fix="use tensor 1"))
        fresh = frozenset(conflict.cuts)
        helped = [name for name in origins if fresh - self.cuts.get(name, frozenset())]
        if fresh and helped:
            for name in helped:
                self.cuts[name] = self.cuts.get(name, frozenset()) | fresh
            return
        why = f"in {self.stood.place or 'the module'}: {conflict.reason}"
        names = [name for name in self.chosen if name in conflict.origins]
        if isinstance(conflict, Unlike):
            names.sort(key=lambda name: self.module.get_parameter(name).numel())
        in_order = (_kind(name, self.module) for name in names)
        first = next((kind for kind in in_order if kind not in self.given_up), None)
        if first is None:
            raise ConfigError(Problem(what=f"cannot be divided: {why}", where=min(origins), fix="use tensor 1"))
        (self.given_up if first in self.taken_back else self.taken_back)[first] = why

    def extend(self, names: Mapping[str, Tensor]) -> None:
        """Matrices that the forward did not reach lie as those of alike modules beside them: experts not chosen."""
        beside = {(_kind(name, self.module), names[name].shape): self.chosen[name] for name in self.chosen}
        for name, x in names.items():
            found = beside.get((_kind(name, self.module), x.shape))
            if name not in self.reached and found is not None:
                self.chosen[name] = found

    def part(self, name: str) -> Parted:
        kind = _kind(name, self.module)
        if name in self.chosen:
            layout, division = self.chosen[name]
            return Parted(layout=layout, kind=kind, division=division)
        return Parted(layout=Layout.WHOLE, kind=kind, why=self.why(kind))

    def why(self, kind: str) -> str:
        return self.given_up.get(kind, self.taken_back.get(kind, ""))

    def divide(self, name: str, layout: Layout, dim: int, *, width: int) -> Division | None:
        """The division of parameter `name` as decided before, or now; None where it stays whole."""
        if name in self.chosen:
            return self.chosen[name][1]
        kind = _kind(name, self.module)
        if kind in self.given_up:
            return None
        if layout is Layout.COLUMN and kind in self.taken_back:
            if width not in self.rows or "*" in kind:
                return None
            layout = Layout.VOCABULARY
        pieces = _pieces(width, self.cuts.get(kind, frozenset()))
        use = Use.VOCABULARY if layout is Layout.VOCABULARY else Use.FEATURES
        division = Division(dim=dim, pieces=pieces, use=use)
        if not division.shared(self.ranks):
            parts = f"its parts of {' and '.join(map(str, dict.fromkeys(pieces)))}" if len(pieces) > 1 else str(width)
            self.given_up.setdefault(kind, f"{parts} do not divide by {self.ranks}")
            return None
        if layout is Layout.VOCABULARY:
            self.rows.add(width)
        self.chosen[name] = (layout, division)
        return division

    def settle(self, name: str, layout: Layout, division: Division) -> Division:
        """As decided before, or as `division` now."""
        return self.chosen.setdefault(name, (layout, division))[1]


def _pieces(width: int, cuts: frozenset[Fraction]) -> tuple[int, ...]:
    if any((cut * width).denominator != 1 for cut in cuts):
        return (width,)
    edges = [0, *sorted(int(cut * width) for cut in cuts), width]
    return tuple(stop - start for start, stop in pairwise(edges))


def _kind(name: str, module: nn.Module) -> str:
    """`name` with a star for each number of a run of alike blocks: what one block cannot, none does."""
    words, owner, found = name.split("."), module, []
    for word in words[:-1]:
        children = list(owner.children())
        alike = isinstance(owner, (nn.ModuleList, nn.Sequential)) and len({type(child) for child in children}) == 1
        child = owner.get_submodule(word)
        found.append("*" if alike and any(True for _ in child.children()) else word)
        owner = child
    return ".".join([*found, words[-1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A parameter that is not decided: `lead` dims in front of the matrix are gone, and `turned` it is transposed."""

    name: str
    trial: _Trial
    lead: int = 0
    turned: bool = False


class Open(Deciding):
    """A parameter of the module in a trial: the first product that uses it decides how it is divided."""

    open: _Open

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = function_name(func), dict(kwargs or {})
        for entry in (*args, *kwargs.values()):
            if isinstance(entry, Open):
                entry.open.trial.reached.add(entry.open.name)
        if name in ("__rmatmul__",):
            return torch.matmul(args[1], args[0])
        if name in _MATRICES:
            return func(*_decided(name, args, kwargs), **{k: v for k, v in kwargs.items() if k in ("beta", "alpha")})
        if name == "embedding":
            return func(args[0], _table(args[0], args[1]), *args[2:], **kwargs)
        lettered = with_matrix(args, _matrix) if name == "einsum" else None
        if lettered is not None:
            return func(*lettered)
        if name == "multi_head_attention_forward":
            given = _attention(args)
            return (multi_head_attention_forward if isinstance(given[5], Divided) else func)(*given, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Open):
            kept = _kept(name, first.open, args)
            if kept is not None:
                found = func(plain(first), *args[1:], **kwargs)
                return _opened(kept, found) if isinstance(found, Tensor) else tuple(_opened(kept, x) for x in found)
        closed = _closed if name in LOOKS | SIZES else partial(_closed_by, name)
        near, named = tree_map(closed, (tuple(args), kwargs))
        return func(*near, **named)


def _closed_by(function: str, x: Any) -> Any:
    """x, all of which `function` uses."""
    if isinstance(x, Open):
        x.open.trial.reached.add(x.open.name)
        x.open.trial.used_whole[x.open.name] = function
    return _closed(x)


def _opened(state: _Open, x: Tensor) -> Open:
    found = plain(x).as_subclass(Open)
    found.open = state
    return found


def _kept(name: str, state: _Open, args: tuple[Any, ...]) -> _Open | None:
    """What a matrix is after a function that leaves it one; None after any other."""
    trial, ndim = state.trial, plain(args[0]).ndim
    if name in ("to", "float", "type", "type_as", "contiguous", "clone"):
        return state
    if name in ("t", "T", "mT") or (name == "transpose" and ndim == 2):
        return _Open(name=state.name, trial=trial, lead=state.lead, turned=not state.turned)
    taken = name == "__getitem__" and (isinstance(args[1], int) or (isinstance(args[1], Tensor) and args[1].ndim == 0))
    if ndim == 3 and not state.turned and (taken or (name in ("select", "unbind") and args[1:2] == (0,))):
        return _Open(name=state.name, trial=trial, lead=state.lead + 1)
    return None


def _decided(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments of a product with its matrix, and the bias that is added, decided."""
    if name == "linear":
        x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return [_closed(x), *_matrix(x, weight, bias, columns=0)]
    if name == "addmm":
        decided, bias = _matrix(args[1], args[2], args[0], columns=1)
        return [bias, _closed(args[1]), decided]
    return [_closed(args[0]), _matrix(args[0], args[1], None, columns=1)[0]]


def _closed(x: Any) -> Any:
    return plain(x) if isinstance(x, Open) else x


def _matrix(x: Tensor, weight: Tensor, bias: Any, *, columns: int) -> tuple[Tensor, Any]:
    """The matrix that x is multiplied by, whose outputs are its dim `columns`, and its bias."""
    if not isinstance(weight, Open) or weight.ndim != 2 or isinstance(x, Open):
        return _closed(weight), _closed(bias)
    state, whole = weight.open, plain(weight)
    trial = state.trial
    by_rows = isinstance(x, Divided) and x.division.dim == x.ndim - 1
    if isinstance(x, Divided) and not by_rows:
        return whole, _closed(bias)
    dim = (1 - columns) if by_rows else columns
    kept = (1 - dim if state.turned else dim) + state.lead
    if by_rows:
        assert isinstance(x, Divided)
        if _kind(state.name, trial.module) in trial.taken_back:
            raise Indivisible(trial.why(_kind(state.name, trial.module)), origins=x.origins)
        division = trial.settle(state.name, Layout.ROW, Division(dim=kept, pieces=x.division.pieces))
    else:
        found = trial.divide(state.name, Layout.COLUMN, kept, width=whole.shape[dim])
        if found is None:
            return whole, _closed(bias)
        division = found
    axis = ImaginedAxis(size=trial.ranks)
    there = Division(dim=division.dim - state.lead, pieces=division.pieces, use=division.use)
    there = Division(dim=1 - there.dim if state.turned else there.dim, pieces=there.pieces, use=there.use)
    held = divided(own(whole, there, axis), there, kind=Ruled, axis=axis, origins=frozenset({state.name}))
    if not isinstance(bias, Open) or by_rows or there.dim != columns:
        return held, _closed(bias)
    last = bias.ndim - 1
    beside = trial.settle(
        bias.open.name, trial.chosen[state.name][0], Division(dim=last + bias.open.lead, pieces=there.pieces)
    )
    near = Division(dim=last, pieces=beside.pieces)
    origins = frozenset({state.name})
    return held, divided(own(plain(bias), near, axis), near, kind=Ruled, axis=axis, origins=origins)


def _table(indexes: Tensor, weight: Any) -> Tensor:
    """A table whose rows are divided where what the module is given picks them, else its columns on trial."""
    if not isinstance(weight, Open):
        return weight
    state, whole = weight.open, plain(weight)
    dim = 0 if isinstance(indexes, Given) else 1
    layout = Layout.COLUMN if dim else Layout.VOCABULARY
    if dim and _kind(state.name, state.trial.module) in state.trial.taken_back:
        return whole
    division = state.trial.divide(state.name, layout, dim, width=whole.shape[dim])
    if division is None or (division.dim == 0 and division.use is Use.FEATURES):
        return whole
    axis = ImaginedAxis(size=state.trial.ranks)
    return divided(own(whole, division, axis), division, kind=Ruled, axis=axis, origins=frozenset({state.name}))


def _attention(args: tuple[Any, ...]) -> list[Any]:
    """Arguments of nn.MultiheadAttention with its packed input matrix cut in three and divided by heads."""
    given = list(args)
    packed, bias, heads = args[5], args[6], args[4]
    if isinstance(packed, Open):
        trial, kind = packed.open.trial, _kind(packed.open.name, packed.open.trial.module)
        trial.cuts.setdefault(kind, frozenset({Fraction(1, 3), Fraction(2, 3)}))
        if heads % trial.ranks:
            trial.given_up.setdefault(kind, f"{heads} heads do not divide by {trial.ranks}")
        given[5], given[6] = _matrix(args[0], packed, bias, columns=0)
    return given if isinstance(given[5], Divided) else [_closed(entry) for entry in given]
