"""Searches that several tests ask for, each made once in a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from meshwright import search
from meshwright.search import decide


def _once(find: Callable[..., Any]) -> Callable[..., Any]:
    """As `find`, whose answers are the same whenever it is asked the same: what is asked is values alone."""
    found: dict[str, Any] = {}

    @wraps(find)
    def asked(*values: Any, **options: Any) -> Any:
        key = repr((values, sorted(options.items())))
        if key not in found:
            found[key] = find(*values, **options)
        return found[key]

    return asked


design = _once(search.design)
best = _once(decide.best)
