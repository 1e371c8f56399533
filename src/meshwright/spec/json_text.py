"""JSON of files that others made, as values: whatever is wrong with a text is one error, and no text is too much."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

MOST_DEEP = 64  # deeper than any document of ours, and shallow enough for whatever walks it
_MOST_BITS = 13_000  # of a whole number: Python writes no more than 4,300 decimal digits
Pairs = Callable[[Iterable[tuple[str, Any]]], Any]


_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a character beyond the first 65,536, as JSON may write it


def parse_json(text: str | bytes, *, pairs: Pairs | None = None, halves: bool = False) -> Any:
    """The value that `text` says; `pairs` makes the tables of it. Raises ValueError that says why there is none.

    Half of a character, a surrogate without the other one, is none but where `halves` are asked for: no file and no
    name of one can hold it.
    """
    try:
        text = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if is_deep(value):
        raise ValueError("it is nested too deep")
    if not halves and has_half(value, text=text):
        raise ValueError("it holds half of a character: a surrogate without the other one")
    return value


class Twice(ValueError):
    """A key that a table has twice, of which one value would be lost."""


def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The table of these keys. Raises Twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Twice(f"{key!r} is there twice")
        found[key] = value
    return found


def has_half(value: Any, *, text: str) -> bool:
    """Whether `text`, which says `value`, has half of a character in it; those that Python has for bytes of a file's
    name that are no UTF-8 are none."""
    if not _HALF.search(text):
        return False
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return True
    return False


def is_deep(value: Any) -> bool:
    """Whether tables and lists are nested deeper than `MOST_DEEP` in `value`."""
    level = [value]
    for _ in range(MOST_DEEP):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def has_long_number(value: Any) -> bool:
    """Whether a whole number in `value`, which is not deep, has thousands of digits."""
    if isinstance(value, dict | list):
        return any(map(has_long_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and value.bit_length() > _MOST_BITS
