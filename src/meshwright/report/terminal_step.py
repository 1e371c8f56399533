"""The step of a plan on the terminal: its waterfall as bars, from 80 columns up."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult

from meshwright.report.terminal_parts import WIDE, bullets, plain, table
from meshwright.report.waterfall import IDEAL, Waterfall
from meshwright.spec.units import LEAST_SHARE, format_percent, format_seconds

BAR_WIDE, BAR_NARROW = 36, 20
LEAST_BAR, BESIDE_BAR = 10, 52  # columns: of the shortest bar, and of what stands beside it


class WaterfallView:
    """The bars of a step, each beginning where the one before it ended."""

    def __init__(self, value: Waterfall) -> None:
        self.value = value

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        mark, room = "#" if options.ascii_only else "\u2588", BAR_WIDE if wide else BAR_NARROW
        room = min(room, max(LEAST_BAR, options.max_width - BESIDE_BAR))
        rows = table(columns=[("where the step goes", "left"), ("time", "right"), ("share", "right")])
        rows.add_column(no_wrap=True)
        if wide:
            rows.add_column("note", overflow="fold")
        notes = []
        for bar in self.value.bars:
            if abs(bar.share) < LEAST_SHARE and bar.name != IDEAL:
                continue
            drawn = _drawn(bar.start, bar.end, step=self.value.step_seconds, room=room, mark=mark)
            style = "green" if bar.name == IDEAL else ""
            figures = format_seconds(bar.seconds), format_percent(bar.share), drawn
            rows.add_row(plain(bar.name, style=style), *figures, *([bar.note] if wide else []))
            notes += [f"{bar.name}: {bar.note}"] if bar.note else []
        rows.add_section()
        mfu = "MFU N/A" if self.value.mfu is None else f"MFU {format_percent(self.value.mfu)}"
        rows.add_row("step", format_seconds(self.value.step_seconds), format_percent(1.0), mfu, style="bold")
        yield rows
        if not wide and notes:
            yield from bullets(notes)


def _drawn(start: float, end: float, *, step: float, room: int, mark: str) -> str:
    """A bar from `start` to `end` of a step that is `room` wide; at least one mark."""
    first = round(room * min(start, end) / step) if step else 0
    last = round(room * max(start, end) / step) if step else 0
    first = min(first, room - 1)
    return " " * first + mark * max(1, last - first)
