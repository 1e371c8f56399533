"""`--set section.key=value`: one pure function that edits a document before it is validated."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.spec.errors import Problem


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
        parsed = tomllib.loads(f"value = {stripped}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if list(parsed) == ["value"] else text


def override(values: Mapping[str, Any], sets: Sequence[str], *, section: str) -> Edited:
    """A copy of `values` with every `key.path=value` of `sets` in force, later ones last; `values` never changes.

    A leading `section.` is dropped, so `job.seed=1` and `seed=1` are the same. A set that is not of this form, or
    goes through something that is not a table, is a problem and changes nothing.
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
    """The path that a set names, without its section: `seed` of `job.seed=1`."""
    path = entry.partition("=")[0].strip()
    return path.removeprefix(f"{section}.")


def _set(result: dict[str, Any], entry: str, section: str) -> None:
    _, equals, text = entry.partition("=")
    keys = set_path(entry, section=section).split(".")
    if not equals:
        raise ValueError("expected key=value")
    if not all(key.strip() for key in keys):
        raise ValueError("the key before = is empty or has an empty part")
    table: Any = result
    for depth, key in enumerate(keys[:-1]):
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise ValueError(f"{'.'.join(keys[: depth + 1])!r} is {table!r}, not a table")
    table = result
    for key in keys[:-1]:
        table = table.setdefault(key, {})
    table[keys[-1]] = parse_value(text)


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}
