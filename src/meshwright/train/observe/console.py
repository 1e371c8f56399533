"""The line a person watches: one live line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import TYPE_CHECKING, TextIO

from meshwright.spec.errors import printable
from meshwright.spec.units import format_bytes, format_count, format_percent, format_seconds
from meshwright.train.observe.metrics import Metrics

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

PLAIN_SECONDS = 5.0
LIVE_SECONDS = 0.1
_RECENT = 20  # steps whose middle is the pace of those to come
_LEAST_FIRST = ("rate", "grad", "useful", "memory", "mfu", "share", "left", "speed")


def step_line(metrics: Metrics, *, total_steps: int, remaining_seconds: float | None, width: int | None = None) -> str:
    """`step 120/500  loss 3.2140  grad 0.871  lr 2.9e-04  5,120 tok/s  MFU N/A  1.21 GiB  97.0 % of prediction ...`.

    Where that is wider than `width`, what matters least is left out.
    """
    speed, mfu, share = metrics["tokens_per_second"], metrics["mfu"], metrics["of_prediction"]
    useful = metrics.get("ettr")
    parts = {
        "step": f"step {metrics['step']:>{len(str(total_steps))}}/{total_steps}",
        "loss": f"loss {metrics['loss']:.4f}",
        "grad": f"grad {metrics['grad_norm']:.3f}",
        "rate": f"lr {metrics['learning_rate']:.2e}",
        "speed": f"{speed:,.0f} tok/s",
        "mfu": f"MFU {format_percent(mfu) if mfu is not None else 'N/A'}",
        "memory": format_bytes(metrics["memory_bytes"] or 0.0),
        "share": f"{format_percent(share)} of prediction" if share is not None else "",
        "useful": f"{format_percent(useful)} useful" if useful is not None else "",
        "left": f"ETA {format_seconds(remaining_seconds)}" if remaining_seconds else "",
    }
    parts = {name: part for name, part in parts.items() if part}
    for name in _LEAST_FIRST:
        if width is None or len("  ".join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())


def evaluation_line(metrics: Metrics) -> str:
    """`step 120  validation loss 3.1025  bits per byte 1.482  after 1.05 M tokens`."""
    return (
        f"step {metrics['step']}  validation loss {metrics['validation_loss']:.4f}  "
        f"bits per byte {metrics['bits_per_byte']:.4f}  after {format_count(metrics['tokens'] or 0)} tokens"
    )


class Console:
    """Writes to `stream`: in place where it is a terminal, whole lines with `PLAIN_SECONDS` between them elsewhere and
    on terminals that cannot move back.

    The first and the last step are always written. `end_step` is where this process stops; None is `total_steps`.
    """

    def __init__(
        self,
        *,
        stream: TextIO,
        total_steps: int,
        end_step: int | None = None,
        plain_seconds: float = PLAIN_SECONDS,
    ) -> None:
        self._stream, self._total_steps, self._plain_seconds = stream, total_steps, plain_seconds
        self._end_step = total_steps if end_step is None else min(end_step, total_steps)
        self._live = _live(stream)
        self._gone = False
        self._written = float("-inf")
        self._pending = ""
        self._recent = deque[float](maxlen=_RECENT)
        self._begun = False

    def step(self, metrics: Metrics) -> None:
        """Shows a step when it is time for one."""
        remaining = self._pace(metrics) * (self._end_step - int(metrics["step"] or 0))
        width = self._live.width if self._live else None
        self._pending = step_line(metrics, total_steps=self._total_steps, remaining_seconds=remaining, width=width)
        now = time.monotonic()
        if now - self._written >= (LIVE_SECONDS if self._live else self._plain_seconds):
            self._write(now)

    def say(self, line: str) -> None:
        """Writes a line that stays, after the step that came before it."""
        if self._live is None:
            self._flush()
        self._attempt(lambda: self._live.keep(line) if self._live else self._print(line))

    def finish(self) -> None:
        """The last step is on the screen, and the terminal is as it was."""
        self._flush()
        if self._live:
            self._attempt(self._live.finish)

    def _pace(self, metrics: Metrics) -> float:
        """Seconds of a step to come: the middle of the last ones. The first of this process, whose kernels were chosen
        or compiled, counts until another is done."""
        seconds = float(metrics["seconds"] or 0.0)
        if not self._begun:
            self._begun = True
            return seconds
        self._recent.append(seconds)
        return median_low(self._recent)

    def _flush(self) -> None:
        if self._pending:
            self._write(time.monotonic())

    def _write(self, now: float) -> None:
        line = self._pending
        self._attempt(lambda: self._live.show(line) if self._live else self._print(line))
        self._written, self._pending = now, ""

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def _attempt(self, show: Callable[[], None]) -> None:
        """A terminal that was closed, or a pipe that nobody reads any more, is no reason to stop training."""
        if not self._gone:
            try:
                show()
            except OSError:
                self._gone = True


def _live(stream: TextIO) -> _Live | None:
    """The live line of a terminal that can redraw one (TERM is not `dumb`); None elsewhere."""
    if not stream.isatty():
        return None
    from rich.console import Console as RichConsole

    console = RichConsole(file=stream, force_terminal=True, highlight=False)
    return None if console.is_dumb_terminal else _Live(console)


class _Live:
    """One line of a terminal, redrawn in place without a thread of its own."""

    def __init__(self, console: RichConsole) -> None:
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    @property
    def width(self) -> int:
        """Columns of the terminal now."""
        return self._live.console.width

    def show(self, line: str) -> None:
        self._live.update(self._text(printable(line), no_wrap=True, overflow="ellipsis"), refresh=True)

    def keep(self, line: str) -> None:
        self._live.console.print(self._text(printable(line)))

    def finish(self) -> None:
        self._live.stop()
