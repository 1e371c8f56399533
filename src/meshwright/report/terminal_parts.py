"""What every view of the terminal is built of: titles, bullets and tables that keep to the width there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from meshwright.spec.errors import printable

WIDE = 124
_LONGEST_WORD = 200  # characters of a word that a cell shows: what is longer is no name


def plain(text: str, *, style: str = "") -> Text:
    """`text` that a terminal shows and obeys nothing of, nor reads as markup: its control characters are spelt out
    before its width is taken, and endless words are cut."""
    return Text(printable(text), style=style)


def title(text: str) -> Text:
    return plain(f"\n{text}", style="bold")


def bullets(lines: Iterable[str]) -> Iterable[Padding]:
    for line in lines:
        yield Padding(plain(f"- {line}"), (0, 0, 0, 1), expand=False)


class PlainTable(Table):
    """A table whose cells are texts as they are: see `plain`."""

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        super().add_row(*map(_cell, cells), style=style, end_section=end_section)


def _cell(cell: RenderableType | None) -> RenderableType | None:
    return Text(printable(cell, longest=_LONGEST_WORD)) if isinstance(cell, str) else cell


def table(*, columns: Sequence[tuple[str, str]]) -> Table:
    """An empty table; columns are (heading, alignment). A heading of "plan" takes the room that is left."""
    empty = PlainTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name, side in columns:
        if side == "right":
            empty.add_column(plain(name), justify="right", no_wrap=True)
        else:
            empty.add_column(plain(name), justify="left", overflow="fold")
    return empty
