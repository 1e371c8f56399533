"""Which plans are asked for: all, or those with some values in one column, below a limit of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Plans that score below `limit()`, which may fall as plans are priced; where a `column` of plans is named, only
    those with one of `values` there."""

    limit: Callable[[], float]
    column: str | None = None
    values: tuple[int, ...] = ()
