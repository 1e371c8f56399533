"""`--set section.key=value`: one pure function that edits a document before it is validated."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.spec.errors import Problem
from meshwright.spec.json_text import MOST_DEEP, has_long_number, is_deep
from meshwright.spec.units import as_written


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """A document with its sets in force, and what is wrong with the sets that are not."""

    values: Mapping[str, Any]
    problems: tuple[Problem, ...] = ()


def parse_value(text: str) -> Any:
    """What `text` says as a TOML value (`8`, `true`, `["a"]`), None for `null`, or the text itself.

    Numbers with units (`4Mi`) stay text: the codec reads them where a number is expected.
    """
    stripped = text.strip()
    if stripped == "null":
        return None
    try:
        parsed = tomllib.loads(f"value = {stripped}", parse_float=as_written)
        is_plain = list(parsed) == ["value"] and not has_long_number(parsed)
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if is_plain else text


def override(values: Mapping[str, Any], sets: Sequence[str], *, section: str) -> Edited:
    """A copy of `values` with every `key.path=value` of `sets` in force, later ones last; `values` never changes.

    A leading `section.` is dropped, so `job.seed=1` and `seed=1` are the same. A number is a place in a list, from 0;
    the one after the last adds to it. A set that is not of this form, or goes through something that is neither a table
    nor a list, is a problem and changes nothing.
    """
    result = _copy(values)
    problems = []
    for entry in sets:
        try:
            _set(result, entry, section)
        except ValueError as error:
            problems.append(Problem(what=str(error), where=f"--set {entry}", fix="write --set optimizer.kind=adamw"))
    return Edited(values=result, problems=tuple(problems))


def set_path(entry: str, *, section: str) -> str:
    """The path that a set names, without its section, as problems name it: `seed` of `job.seed=1`, and
    `data.sources[0].path` of `job.data.sources.0.path=text`."""
    first, *rest = _keys(entry, section=section)
    return first + "".join(f"[{key}]" if key.isdecimal() else f".{key}" for key in rest)


def without(values: Mapping[str, Any], paths: Iterable[str]) -> Mapping[str, Any]:
    """A copy of `values` without the fields at `paths`, as problems name them; a list of which an entry would go goes
    whole, so that the others keep their places."""
    result = _copy(values)
    for path in paths:
        keys = re.findall(r"[^.\[\]]+", path)
        while keys and keys[-1].isdecimal():
            keys.pop()
        held = _held(result, keys[:-1])
        if keys and isinstance(held, dict):
            held.pop(keys[-1], None)
    return result


def holds(values: Mapping[str, Any], path: str) -> bool:
    """Whether `values` say anything at `path`, as problems name it."""
    *first, last = re.findall(r"[^.\[\]]+", path)
    held = _held(values, first)
    if isinstance(held, list):
        return last.isdecimal() and int(last) < len(held)
    return isinstance(held, Mapping) and last in held


def _held(value: Any, keys: Sequence[str]) -> Any:
    """What is at the place that `keys` name; None where there is none."""
    for key in keys:
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _keys(entry: str, *, section: str) -> list[str]:
    return entry.partition("=")[0].strip().removeprefix(f"{section}.").split(".")


def _set(result: dict[str, Any], entry: str, section: str) -> None:
    _, equals, text = entry.partition("=")
    keys = _keys(entry, section=section)
    if not equals:
        raise ValueError("expected key=value")
    if not all(key.strip() for key in keys):
        raise ValueError("the key before = is empty or has an empty part")
    if len(keys) > MOST_DEEP:
        raise ValueError("the key before = is nested too deep")
    value = parse_value(text)
    if is_deep(value):
        raise ValueError("the value is nested too deep")
    _walk(_copy(result), keys)
    _walk(result, keys)[keys[-1]] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class _List:
    """Places of a list by the words for them."""

    values: list[Any]
    path: str

    def __setitem__(self, key: str, value: Any) -> None:
        self.values[self._place(key) :] = [value, *self.values[self._place(key) + 1 :]]

    def setdefault(self, key: str, value: Any) -> Any:
        place = self._place(key)
        if place == len(self.values):
            self.values.append(value)
        return self.values[place]

    def _place(self, key: str) -> int:
        count = len(self.values)
        if not key.isdecimal() or int(key) > count:
            raise ValueError(f"{self.path!r} is a list of {count}: {key!r} is no place from 0 to {count}")
        return int(key)


def _walk(result: dict[str, Any], keys: Sequence[str]) -> dict[str, Any] | _List:
    """What holds the last of `keys`, made where it is not there. Raises ValueError where the way there ends."""
    table: dict[str, Any] | _List = result
    for depth, key in enumerate(keys[:-1]):
        path, after = ".".join(keys[: depth + 1]), keys[depth + 1]
        inner = table.setdefault(key, [] if after.isdecimal() else {})
        if isinstance(inner, list):
            inner = _List(values=inner, path=path)
            inner.setdefault(after, {})
        elif not isinstance(inner, dict):
            raise ValueError(f"{path!r} is {inner!r}, not a table")
        table = inner
    return table


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(entry) for key, entry in value.items()}
    return [_copy(entry) for entry in value] if isinstance(value, list) else value
