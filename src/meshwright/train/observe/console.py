"""The line a person watches: one live line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from meshwright.spec.units import format_bytes, format_count, format_percent, format_seconds
from meshwright.train.observe.metrics import Metrics

PLAIN_SECONDS = 5.0
LIVE_SECONDS = 0.1
_SMOOTHING = 0.1


def step_line(metrics: Metrics, *, total_steps: int, remaining_seconds: float | None) -> str:
    """`step 120/500  loss 3.2140  grad 0.871  lr 2.9e-04  5,120 tok/s  MFU N/A  1.21 GiB  97.0 % of prediction ...`."""
    speed, mfu, share = metrics["tokens_per_second"], metrics["mfu"], metrics["of_prediction"]
    parts = [
        f"step {metrics['step']:>{len(str(total_steps))}}/{total_steps}",
        f"loss {metrics['loss']:.4f}",
        f"grad {metrics['grad_norm']:.3f}",
        f"lr {metrics['learning_rate']:.2e}",
        f"{speed:,.0f} tok/s",
        f"MFU {format_percent(mfu) if mfu is not None else 'N/A'}",
        format_bytes(metrics["memory_bytes"] or 0.0),
    ]
    if share is not None:
        parts.append(f"{format_percent(share)} of prediction")
    if remaining_seconds is not None:
        parts.append(f"ETA {format_seconds(remaining_seconds)}")
    return "  ".join(parts)


def evaluation_line(metrics: Metrics) -> str:
    """`step 120  validation loss 3.1025  bits per byte 1.482  after 1.05 M tokens`."""
    return (
        f"step {metrics['step']}  validation loss {metrics['validation_loss']:.4f}  "
        f"bits per byte {metrics['bits_per_byte']:.4f}  after {format_count(metrics['tokens'] or 0)} tokens"
    )


class Console:
    """Writes to `stream`: in place where it is a terminal, whole lines with `PLAIN_SECONDS` between them elsewhere.

    The first and the last step are always written.
    """

    def __init__(self, *, stream: TextIO, total_steps: int, plain_seconds: float = PLAIN_SECONDS) -> None:
        self._stream, self._total_steps, self._plain_seconds = stream, total_steps, plain_seconds
        self._live = _Live(stream) if stream.isatty() else None
        self._written = float("-inf")
        self._pending = ""
        self._seconds: float | None = None

    def step(self, metrics: Metrics) -> None:
        """Shows a step when it is time for one."""
        seconds = float(metrics["seconds"] or 0.0)
        ahead = (1.0 - _SMOOTHING) * self._seconds + _SMOOTHING * seconds if self._seconds else seconds
        self._seconds = ahead
        remaining = ahead * (self._total_steps - int(metrics["step"] or 0))
        self._pending = step_line(metrics, total_steps=self._total_steps, remaining_seconds=remaining)
        now = time.monotonic()
        if now - self._written >= (LIVE_SECONDS if self._live else self._plain_seconds):
            self._write(now)

    def say(self, line: str) -> None:
        """Writes a line that stays, after the step that came before it."""
        if self._live:
            self._live.keep(line)
            return
        self._flush()
        print(line, file=self._stream, flush=True)

    def finish(self) -> None:
        """The last step is on the screen, and the terminal is as it was."""
        self._flush()
        if self._live:
            self._live.finish()

    def _flush(self) -> None:
        if self._pending:
            self._write(time.monotonic())

    def _write(self, now: float) -> None:
        if self._live:
            self._live.show(self._pending)
        else:
            print(self._pending, file=self._stream, flush=True)
        self._written, self._pending = now, ""


class _Live:
    """One line of a terminal, redrawn in place without a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        console = RichConsole(file=stream, force_terminal=True, highlight=False)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, line: str) -> None:
        self._live.update(self._text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def keep(self, line: str) -> None:
        self._live.console.print(self._text(line))

    def finish(self) -> None:
        self._live.stop()
