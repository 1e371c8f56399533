"""Frozen dataclasses to plain JSON values and back: strict, tagged unions by `kind`, every error at once.

Reading never guesses: an unknown key, a missing one, a wrong type or a value that no enum has is a problem with its
path and the nearest name. Standard library only, so that a worker needs nothing else to read a plan.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.units import Measure, NotRead, parse_count, parse_measure

T = TypeVar("T")
_LONGEST_SHOWN = 200
_MOST_BITS = 1000  # what is more has no floating-point number beside it
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "nothing"}
_PLAIN = frozenset({int, float, str, bool, type(None)})


@dataclasses.dataclass(frozen=True, slots=True)
class Among:
    """Of a field annotated with it: of the members of its enum those that it takes."""

    members: tuple[Enum, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """Of a field of text annotated with it: the name of a thing that is looked up elsewhere. What is no text is kept as
    it was written, so that whoever knows the names refuses it with those that there are."""


def encode(value: Any) -> Any:
    """JSON values for `value`: dataclasses become objects with every field, enums their values."""
    kind: type = type(value)
    if kind in _PLAIN:
        return value
    names = _field_names(kind)
    if names is not None:
        held = ((name, getattr(value, name)) for name in names)
        return {name: item if type(item) in _PLAIN else encode(item) for name, item in held}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(encode(key)): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass; None of another kind of value."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def canonical(value: Any) -> str:
    """The one text of a value: sorted keys, no spaces. Equal values have equal texts."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"))


def lasting(value: Any) -> str:
    """As `canonical`, without fields at their defaults: a later version that has more fields writes the same text."""
    return json.dumps(_changed(value), sort_keys=True, separators=(",", ":"))


def _changed(value: Any) -> Any:
    kind: type = type(value)
    if kind in _PLAIN:
        return value
    names = _field_names(kind)
    if names is None:
        return [_changed(item) for item in value] if isinstance(value, (tuple, list)) else encode(value)
    defaults, found = _defaults(kind), {}
    for name in names:
        item = getattr(value, name)
        if name == "kind" or name not in defaults or (defaults[name] is not item and defaults[name] != item):
            found[name] = _changed(item)
    return found


@cache
def _defaults(kind: type) -> Mapping[str, Any]:
    """The default of every field of a dataclass that has one."""
    found = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def decode(kind: type[T], value: Any, where: str = "") -> T:
    """The `kind` that `value` says. Raises ConfigError with every problem found, each at its path under `where`."""
    problems: list[Problem] = []
    result = _decode(kind, value, where, problems)
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, result)


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """`did you mean 'pipeline'?`, or the list of what is known when nothing is near.

    What holds the whole name (`nvfp4` of fp4) is nearer than what is spelt alike (`fp64`).
    """
    known = list(known)
    holding = [other for other in known if len(name) > 2 and name.lower() in other.lower()]
    close = difflib.get_close_matches(name, holding or known, n=1, cutoff=0.0 if holding else 0.6)
    return f"did you mean {close[0]!r}?" if close else f"one of {', '.join(sorted(known))}"


@cache
def field_types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _decode(kind: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    origin = typing.get_origin(kind)
    if (members := _members(kind)) is not None:
        return _decode_choice(members, value, where, problems)
    if origin is typing.Annotated:
        is_name = any(isinstance(extra, Named) for extra in kind.__metadata__) and type(value) in (int, float, bool)
        return _decode(kind.__origin__, _shown(value) if is_name else value, where, problems)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), value, where, problems)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, where, problems)
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(typing.get_args(kind), value, where, problems)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), value, where, problems)
    return _decode_scalar(kind, value, where, problems)


def _members(kind: Any) -> tuple[Enum, ...] | None:
    """What may be chosen for a field that is an enum, some of one (Among), or one of several; None of other fields."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(kind)
    if typing.get_origin(kind) is typing.Annotated:
        return next((extra.members for extra in kind.__metadata__ if isinstance(extra, Among)), None)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        each = [_members(part) for part in typing.get_args(kind)]
        if all(members is not None for members in each):
            return tuple(member for members in each for member in members or ())
    return None


def _decode_choice(members: tuple[Enum, ...], value: Any, where: str, problems: list[Problem]) -> Any:
    told = ""
    for kind in dict.fromkeys(type(member) for member in members):
        try:
            found = kind(value)
        except ValueError as error:
            told = error.fix if isinstance(error, NotRead) else told
            continue
        if found in members:
            return found
        told = told or f"one of {', '.join(sorted(str(member.value) for member in members))}"
    fix = told or nearest(str(value), [str(member.value) for member in members])
    problems.append(Problem(what=f"{_shown(value)} is not a choice", where=where, fix=fix))
    return None


def _shown(value: Any) -> str:
    """The value as it was written, or how it begins."""
    text = repr(value) if isinstance(value, (str, int, float)) else json.dumps(value, default=str)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def read_number(text: str, *, whole: bool, where: str) -> float:
    """The number that `text` says of the field at `where`, whose name says what it measures; else what is whole is
    counted. Raises NotRead for the unit of something else.
    """
    measure = _measure(where.split("."))
    return parse_count(text) if whole and measure is Measure.PLAIN else parse_measure(text, measure)


def _measure(names: Sequence[str]) -> Measure:
    last = names[-1]
    if last.endswith("_seconds"):
        return Measure.SECONDS
    if last.endswith("_bytes"):
        return Measure.BYTES
    if last.endswith("bandwidth") or last in ("bytes_per_second", "across_sockets"):
        return Measure.RATE
    return Measure.FLOPS if last.endswith("_flops") or "peak_flops" in names else Measure.PLAIN


def _decode_scalar(kind: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    if kind is Any:
        return value
    if kind in (int, float) and isinstance(value, str):
        try:
            value = read_number(value, whole=kind is int, where=where)
        except NotRead as error:
            problems.append(Problem(what=error.what, where=where, fix=error.fix))
            return None
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            problems.append(Problem(what=f"{_shown(value)} is too large for any computer", where=where))
            return None
    if kind is int and isinstance(value, int) and value.bit_length() > _MOST_BITS:
        problems.append(Problem(what=f"{_shown(value)} is too large for any computer", where=where))
        return None
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        expected = _EXPECTED.get(kind, kind.__name__)
        fix = f'write "{value}", in quotes' if kind is str and type(value) in (int, float) else ""
        problems.append(Problem(what=f"expected {expected}, got {_shown(value)}", where=where, fix=fix))
        return None
    return value


def _decode_union(kinds: tuple[Any, ...], value: Any, where: str, problems: list[Problem]) -> Any:
    if type(None) in kinds and (value is None or (value == "none" and not _takes_text(kinds))):
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    tagged = {kind.__dataclass_fields__["kind"].default: kind for kind in kinds if _is_tagged(kind)}
    if tagged and isinstance(value, Mapping):
        tag = value.get("kind", next(iter(tagged)) if len(tagged) == 1 else None)
        if not isinstance(tag, str) or tag not in tagged:
            place = f"{where}.kind" if "kind" in value else where
            problems.append(Problem(what=f"kind {_shown(tag)} is unknown", where=place, fix=nearest(str(tag), tagged)))
            return None
        return _decode(tagged[tag], value, where, problems)
    if len(tagged) == len(kinds) > 1:
        fix = f"write {where}.kind = {json.dumps(value)}" if isinstance(value, str) and value in tagged else ""
        fix = fix or f"give its keys, first {where}.kind: {', '.join(sorted(tagged))}"
        problems.append(Problem(what=f"expected a table, got {_shown(value)}", where=where, fix=fix))
        return None
    for kind in kinds[:-1]:
        attempt: list[Problem] = []
        result = _decode(kind, value, where, attempt)
        if not attempt:
            return result
    return _decode(kinds[-1], value, where, problems)


def _takes_text(kinds: tuple[Any, ...]) -> bool:
    """Whether the text "none" may be a value itself; where it may not, it stands for null, which TOML lacks."""
    return any(kind is str or (isinstance(kind, type) and issubclass(kind, Enum)) for kind in kinds)


def _is_tagged(kind: Any) -> bool:
    """Whether `kind` is one of a union told apart by `kind`: its own tag is the default, as plain text."""
    field = kind.__dataclass_fields__.get("kind") if dataclasses.is_dataclass(kind) else None
    return field is not None and type(field.default) is str


def _decode_tuple(kinds: tuple[Any, ...], value: Any, where: str, problems: list[Problem]) -> Any:
    if not isinstance(value, (list, tuple)):
        # Shells take the quotes of ["one"] away: what is left is the text [one].
        parts = [part.strip() for part in value.strip(" []").split(",")] if isinstance(value, str) else [value]
        fix = f"write {json.dumps(parts)}" if all(isinstance(part, (str, int, float)) for part in parts) else ""
        problems.append(Problem(what=f"expected a list, got {_shown(value)}", where=where, fix=fix))
        return None
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_decode(kinds[0], item, f"{where}[{index}]", problems) for index, item in enumerate(value))
    if len(kinds) != len(value):
        problems.append(Problem(what=f"expected {len(kinds)} values, got {len(value)}", where=where))
        return None
    pairs = zip(kinds, value, strict=True)
    return tuple(_decode(kind, item, f"{where}[{index}]", problems) for index, (kind, item) in enumerate(pairs))


def _decode_mapping(kinds: tuple[Any, ...], value: Any, where: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        problems.append(Problem(what=f"expected a table, got {_shown(value)}", where=where))
        return None
    return {
        _decode(kinds[0], key, f"{where}.{key}", problems): _decode(kinds[1], item, f"{where}.{key}", problems)
        for key, item in value.items()
    }


def _decode_dataclass(kind: type, value: Any, where: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        keys = [f"{where}.{field.name}" if where else field.name for field in dataclasses.fields(kind)][:4]
        what = f"expected a table, got {_shown(value)}"
        problems.append(Problem(what=what, where=where, fix=f"give its keys, such as {', '.join(keys)}"))
        return None
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints, found = field_types(kind), {}
    before = len(problems)
    for key, item in value.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in fields:
            problems.append(Problem(what="unknown key", where=path, fix=_meant(str(key), hints)))
        else:
            found[key] = _decode(hints[key], _with_kind(item, fields[key].default), path, problems)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in value:
            problems.append(Problem(what=f"{name!r} is missing", where=where or kind.__name__))
    return kind(**found) if len(problems) == before else None


def _meant(key: str, hints: Mapping[str, Any]) -> str:
    """As `nearest` of the fields of a table; where none of them is `key` and one of a table among them is, that one."""
    tables = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    inside = [name for name, hint in tables.items() if key in {field.name for field in dataclasses.fields(hint)}]
    return f"did you mean {f'{inside[0]}.{key}'!r}?" if inside else nearest(key, hints)


def _with_kind(value: Any, default: Any) -> Any:
    """A table that does not say its kind is of the kind of the field's default."""
    if not isinstance(value, Mapping) or "kind" in value or not _is_tagged(type(default)):
        return value
    return {"kind": default.kind, **value}
