"""Specs out: TOML for people with a comment on every key, JSON for machines."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def save(value: Any, path: str | Path) -> None:
    """Write a spec to `path`, as TOML when it ends in .toml and as JSON otherwise; the same spec loads from it.

    Raises ConfigError where TOML cannot hold it: bytes of a file's name that are no UTF-8.
    """
    file = Path(path)
    toml = file.suffix.lower() == ".toml"
    text = dump_toml(value) if toml else json.dumps(codec.encode(value), indent=1) + "\n"
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        why = f"a name in it holds bytes that are no UTF-8: {error.object[error.start]!r}"
        fix = "name a file that ends in .json"
        raise ConfigError(Problem(what="TOML cannot hold this", where=str(file), why=why, fix=fix)) from None
    file.write_bytes(content)


def dump_toml(value: Any, *, comments: Mapping[str, str] | None = None) -> str:
    """The spec as TOML, scalars before tables; `comments` by path stand above their keys.

    TOML has no null: a field that is None by default is left out, any other None is written "none".
    """
    lines: list[str] = []
    _table(_plain(value), "", lines, comments or {})
    return "\n".join(lines).strip("\n") + "\n"


def _plain(value: Any) -> Any:
    """As codec.encode, without the fields that are None by default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = [field for field in dataclasses.fields(value) if not _left_out(field, getattr(value, field.name))]
        return {field.name: _plain(getattr(value, field.name)) for field in kept}
    if isinstance(value, Mapping):
        return {str(codec.encode(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return codec.encode(value)


def _left_out(field: dataclasses.Field[Any], value: Any) -> bool:
    return value is None and field.default is None


def _table(values: Mapping[str, Any], path: str, lines: list[str], comments: Mapping[str, str]) -> None:
    nested = {key: item for key, item in values.items() if isinstance(item, Mapping) or _is_tables(item)}
    for key, item in values.items():
        if key in nested:
            continue
        lines.extend(f"# {line}" for line in comments.get(f"{path}{key}", "").splitlines())
        lines.append(f"{_key(key)} = {_scalar(item)}")
    for key, item in nested.items():
        name = f"{path}{_key(key)}"
        lines.append("")
        lines.extend(f"# {line}" for line in comments.get(f"{path}{key}", "").splitlines())
        if isinstance(item, Mapping):
            lines.append(f"[{name}]")
            _table(item, f"{name}.", lines, comments)
            continue
        for entry in item:
            lines.append(f"[[{name}]]")
            _table(entry, f"{name}.", lines, comments)


def _is_tables(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(entry, Mapping) for entry in item)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _scalar(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_scalar(item)}' for key, item in value.items())}}}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
