"""A figure: a drawing, what its colours mean, and the same as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as text; the first `words` columns are words, the others figures."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`body` is markup made here, never text from a file; `legend` pairs a colour's class with its name."""

    title: str
    caption: str
    body: str
    table: Table
    legend: tuple[tuple[str, str], ...] = ()
    wide: bool = False


def colour(name: str) -> str:
    """The CSS class of a report line or a memory part: `c-gradient-collectives`."""
    return "c-" + name.replace(" ", "-")
