"""YAML of plain values, in the order they were made, for documents that people read before they use them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Words that need no quotes: none of them can be read as a number, a truth or nothing.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
# A block keeps such a text as it is: its first line says how far it is indented.
_BLOCK = re.compile(r"[^\s].*\n[\n -~]*")
_READ_OTHERWISE = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


def yaml_text(value: Mapping[str, Any]) -> str:
    """The document of nested mappings, sequences, texts, whole numbers and truths; texts of several lines as blocks."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [line for key, entry in value.items() for line in _entry(f"{_scalar(key)}:", entry)]
    return [line for entry in value for line in _item(entry)]


def _entry(head: str, value: Any) -> list[str]:
    if isinstance(value, str) and _BLOCK.fullmatch(value) and not value.endswith("\n\n"):
        return [f"{head} |{_chomp(value)}", *(f"  {line}" if line else "" for line in value.splitlines())]
    if _is_nested(value):
        return [head, *(f"  {line}" for line in _lines(value))]
    return [f"{head} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    if _is_nested(value):
        first, *rest = _lines(value)
        return [f"- {first}", *(f"  {line}" for line in rest)]
    return _entry("-", value)


def _is_nested(value: Any) -> bool:
    return bool(value) and isinstance(value, Mapping | Sequence) and not isinstance(value, str)


def _chomp(text: str) -> str:
    """What a block says of the line end after its last line."""
    return "" if text.endswith("\n") else "-"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _READ_OTHERWISE:
        return value
    return json.dumps(value)
