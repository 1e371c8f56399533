"""Searches that several tests ask for, each made once in a process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from meshwright import search
from meshwright.search import decide


def once(find: Callable[..., Any]) -> Callable[..., Any]:
    """As `find`, whose answers are the same whenever it is asked the same: what is asked is values alone."""
    found: dict[str, Any] = {}
    signature = inspect.signature(find)

    @wraps(find)
    def asked(*values: Any, **options: Any) -> Any:
        bound = signature.bind(*values, **options)
        bound.apply_defaults()  # what is left out is asked as it is where it is said
        key = repr(sorted(bound.arguments.items()))
        if key not in found:
            found[key] = find(*values, **options)
        return found[key]

    return asked


design = once(search.design)
best = once(decide.best)
