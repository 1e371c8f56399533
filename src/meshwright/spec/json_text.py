"""JSON of files that others made, as values: whatever is wrong with a text is one error, and no text is too much."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

MOST_DEEP = 64  # deeper than any document of ours, and shallow enough for whatever walks it
_MOST_BITS = 13_000  # of a whole number: Python writes no more than 4,300 decimal digits
Pairs = Callable[[Iterable[tuple[str, Any]]], Any]


def parse_json(text: str | bytes, *, pairs: Pairs | None = None) -> Any:
    """The value that `text` says; `pairs` makes the tables of it. Raises ValueError that says why there is none."""
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if is_deep(value):
        raise ValueError("it is nested too deep")
    return value


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
