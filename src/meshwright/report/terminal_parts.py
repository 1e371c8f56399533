"""What every view of the terminal is built of: titles, bullets and tables that keep to the width there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDE = 124


def title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def bullets(lines: Iterable[str]) -> Iterable[Padding]:
    for line in lines:
        yield Padding(Text(f"- {line}"), (0, 0, 0, 1), expand=False)


def table(*, columns: Sequence[tuple[str, str]]) -> Table:
    """An empty table; columns are (heading, alignment). A heading of "plan" takes the room that is left."""
    empty = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name, side in columns:
        if side == "right":
            empty.add_column(name, justify="right", no_wrap=True)
        else:
            empty.add_column(name, justify="left", overflow="fold")
    return empty
