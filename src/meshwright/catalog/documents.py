"""TOML and JSON files in, specs out: every error of a file at once, each with its file, line, path and fix."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from meshwright.catalog.kinds import refuse_another
from meshwright.catalog.migrations import migrate
from meshwright.catalog.overrides import holds, override, set_path, without
from meshwright.catalog.positions import json_lines, locate, toml_lines
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.json_text import MOST_DEEP, Twice, has_half, has_long_number, is_deep, once
from meshwright.spec.paths import near_names
from meshwright.spec.units import as_written

T = TypeVar("T")

# What a person or a program writes of a model, machines or a job; a device that never ends has more.
_MOST_BYTES = 64 * 2**20
# Keys of more parts than tables may be nested: tomllib takes time by the square of them.
_LONG_KEY = re.compile(rf"""(?<![\w"'.-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MOST_DEEP}}}""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed file: its name as the user gave it, its text and its values."""

    name: str
    text: str
    values: Mapping[str, Any]

    @property
    def is_toml(self) -> bool:
        return self.name.lower().endswith(".toml")

    def place(self, path: str) -> str:
        """`job.toml:3 optimizer.kind`: where a person finds `path`."""
        if not self.name:
            return path
        lines = toml_lines(self.text) if self.is_toml else json_lines(self.text)
        return f"{self.name}:{locate(lines, path)} {path}".rstrip()


EMPTY = Document(name="", text="", values={})


def read(path: str | Path) -> Document:
    """The document in the file `path`, TOML by its ending and JSON otherwise.

    Raises ConfigError when the file is missing (with near names in its folder), is a folder, is not text, or is not
    well formed (with line and column).
    """
    name, text = str(path), read_text(path)
    deep = ConfigError(Problem(what="nested too deep", where=name))
    is_toml = name.lower().endswith(".toml")
    if is_toml and _LONG_KEY.search(text):
        raise deep
    long = ConfigError(Problem(what="a number in it has thousands of digits", where=name))
    try:
        if is_toml:
            values = tomllib.loads(text, parse_float=as_written)
        else:
            values = json.loads(text, parse_float=as_written, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        what = "the file is empty" if not text.strip() else f"not JSON: {error.msg} at column {error.colno}"
        raise ConfigError(Problem(what=what, where=f"{name}:{error.lineno}", fix=_other_form(name, text))) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(Problem(what=f"not TOML: {error}", where=name, fix=_other_form(name, text))) from None
    except Twice as error:
        fix = "leave one of them out"
        raise ConfigError(Problem(what=str(error), where=name, fix=fix)) from None
    except ValueError:
        raise long from None
    except RecursionError:
        raise deep from None
    if is_deep(values):
        raise deep
    if has_long_number(values):
        raise long
    if has_half(values, text=text):
        raise ConfigError(Problem(what="half of a character in it: a surrogate without the other one", where=name))
    if not isinstance(values, dict):
        got = {"int": "a number", "NoneType": "null"}.get(type(values).__name__, f"a {type(values).__name__}")
        raise ConfigError(Problem(what=f"expected a table of keys, got {got}", where=name))
    return Document(name=name, text=text, values=values)


def _other_form(name: str, text: str) -> str:
    """What to do about a file that is not of the form that its ending says."""
    is_toml = name.lower().endswith(".toml")
    form, ending, read_as = ("JSON", "json", json.loads) if is_toml else ("TOML", "toml", tomllib.loads)
    with suppress(ValueError, RecursionError):
        if text.strip() and not _LONG_KEY.search(text):
            read_as(text)
            return f"it is {form}: give it a name that ends in .{ending}"
    return "" if name.lower().endswith((".toml", ".json")) else "TOML is read from files that end in .toml alone"


def decode(
    kind: type[T],
    document: Document,
    *,
    section: str = "",
    sets: Sequence[str] = (),
    check: Callable[[T], T] | None = None,
    each: Callable[[T], Iterable[Problem]] | None = None,
) -> T:
    """The `kind` that `document` with `sets` in force says; problems name the line, or the set, they come from.

    `check` sees the decoded value and raises ConfigError for what is well formed and yet not possible. `each` finds
    what of it is wrong field by field, and sees what is left where fields cannot be decoded.
    """

    paths = tuple(set_path(entry, section=section) for entry in sets)

    def build() -> T:
        refuse_another(document.values, kind=kind.__name__, name=document.name)
        value = _decode(kind, document.values, sets, section, each=each)
        return value if check is None else check(value)

    return located(build, document, root=kind.__name__, sets=paths)


def located(build: Callable[[], T], document: Document, *, root: str = "", sets: Sequence[str] = ()) -> T:
    """What `build` returns; the paths in the ConfigError it raises become places in `document` or in `sets`."""
    try:
        return build()
    except ConfigError as error:
        raise ConfigError([_located(problem, document, root, sets) for problem in error.problems]) from None


def _decode(
    kind: type[T],
    values: Mapping[str, Any],
    sets: Sequence[str],
    section: str,
    *,
    each: Callable[[T], Iterable[Problem]] | None,
) -> T:
    edited = override(migrate(values, kind=kind.__name__), sets, section=section)
    problems = list(edited.problems)
    migrated = migrate(edited.values, kind=kind.__name__)
    try:
        result = codec.decode(kind, migrated)
    except ConfigError as error:
        others = [] if each is None else _others(kind, migrated, error.problems, each)
        raise ConfigError([*problems, *error.problems, *others]) from None
    if problems:
        raise ConfigError(problems)
    return result


def _others(
    kind: type[T],
    values: Mapping[str, Any],
    problems: Sequence[Problem],
    each: Callable[[T], Iterable[Problem]],
) -> list[Problem]:
    """What `each` finds of `values` without what `problems` are of."""
    places = [problem.where for problem in problems]
    try:
        left = codec.decode(kind, without(values, places))
    except ConfigError:
        return []
    return [problem for problem in each(left) if problem.where not in places]


def place_of(path: str, document: Document, *, sets: Sequence[str] = ()) -> str:
    """Where `path` is said: `--set optimizer.kind` where one of the paths of `sets` says it, or says something inside
    what `document` does not hold at all; else in `document`."""
    if path and any(path == entry or path.startswith((f"{entry}.", f"{entry}[")) for entry in sets):
        return f"--set {path}"
    inside = next((entry for entry in sets if path and entry.startswith((f"{path}.", f"{path}["))), "")
    if inside and not holds(document.values, path):
        return f"--set {inside}"
    return document.place(path)


def _located(problem: Problem, document: Document, root: str, sets: Sequence[str]) -> Problem:
    path = "" if problem.where == root else problem.where
    if path.startswith("--set") or path == document.name:
        return problem
    return replace(problem, where=place_of(path, document, sets=sets) or root)


def read_text(path: str | Path, *, form: str = "a TOML or JSON file") -> str:
    """The text of the file `path`, which should be `form`. Raises ConfigError as `read` does where there is none."""
    name, file = str(path), Path(path)
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        fix = f"standard input is not read: name {form}" if name == "-" else _near(file)
        raise ConfigError(Problem(what="no such file", where=name, fix=fix)) from None
    except IsADirectoryError:
        inside = sorted(entry.name for entry in file.iterdir() if entry.suffix in (".toml", ".json"))[:5]
        fix = f"name one of its files: {', '.join(inside)}" if inside else "name a .toml or .json file"
        raise ConfigError(Problem(what="is a folder, not a file", where=name, fix=fix)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(what=f"cannot be read: {getattr(error, 'strerror', error)}", where=name)) from None
    if len(content) > _MOST_BYTES:
        what = f"is longer than {_MOST_BYTES // 2**20} MiB"
        raise ConfigError(Problem(what=what, where=name, fix=f"expected {form}"))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"is not text: byte {error.start} is not UTF-8"
        raise ConfigError(Problem(what=what, where=name, fix=f"expected {form}")) from None
    if "\0" in text:
        raise ConfigError(Problem(what="is not text: it holds a zero byte", where=name))
    return text


def _near(file: Path) -> str:
    folder = file.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either"
    names = [entry.name for entry in folder.iterdir() if entry.is_file()]
    close = near_names(file.name, names)
    return f"did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
