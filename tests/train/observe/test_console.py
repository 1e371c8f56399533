"""What a person watches, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from meshwright.train.events import StepDone
from meshwright.train.observe.console import Console, evaluation_line, step_line
from meshwright.train.observe.metrics import Metrics, Yardstick, of_step


def metrics(step: int = 7, *, peak: float | None = 2e12, seconds: float = 0.5) -> Metrics:
    event = StepDone(
        step=step,
        tokens=step * 1000,
        loss=3.25,
        grad_norm=0.5,
        learning_rate=3e-4,
        seconds=seconds,
        memory_bytes=2.0**30,
    )
    yardstick = Yardstick(tokens_per_step=1000, model_flops=5e11, peak_flops=peak, predicted_seconds=0.4)
    return of_step(event, yardstick=yardstick)


def test_metrics_of_a_step_are_worked_out_from_the_yardstick() -> None:
    values = metrics()
    assert values["tokens_per_second"] == 2000.0
    assert values["mfu"] == 0.5
    assert values["of_prediction"] == 0.8


def test_the_line_says_everything_and_mfu_is_not_available_without_a_peak() -> None:
    line = step_line(metrics(peak=None), total_steps=120, remaining_seconds=90.0)
    for part in (
        "step   7/120",
        "loss 3.2500",
        "2,000 tok/s",
        "MFU N/A",
        "1 GiB",
        "80.0 % of prediction",
        "ETA 90.0 s",
    ):
        assert part in line
    assert "MFU 50.0 %" in step_line(metrics(), total_steps=120, remaining_seconds=None)


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    whole = step_line(metrics(), total_steps=120, remaining_seconds=90.0)
    for width in (20, 40, 60, 80, 100, 200):
        line = step_line(metrics(), total_steps=120, remaining_seconds=90.0, width=width)
        assert len(line) <= max(width, 27)
        assert line.startswith("step   7/120  loss 3.2500")
        assert ("ETA" in line) == (width >= 60)
    assert line == whole


def test_evaluation_line() -> None:
    values: Metrics = {"step": 5, "tokens": 1000, "validation_loss": 2.0, "bits_per_byte": 1.25}
    assert evaluation_line(values) == "step 5  validation loss 2.0000  bits per byte 1.2500  after 1 K tokens"


def test_elsewhere_lines_are_plain_few_and_the_last_step_is_written() -> None:
    stream = io.StringIO()
    console = Console(stream=stream, total_steps=50, plain_seconds=1000.0)
    for step in range(1, 51):
        console.step(metrics(step))
    console.finish()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/50", "50/50"]
    assert "\x1b" not in stream.getvalue()


def test_what_is_said_comes_after_the_step_before_it() -> None:
    stream = io.StringIO()
    console = Console(stream=stream, total_steps=50, plain_seconds=1000.0)
    for step in (1, 2):
        console.step(metrics(step))
    console.say("saved")
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["step", "step", "saved"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_that_cannot_redraw_has_whole_lines_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    console = Console(stream=stream, total_steps=50, plain_seconds=0.0)
    for step in (1, 2):
        console.step(metrics(step))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/50", "2/50"]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_has_one_line_drawn_again_and_what_is_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream=stream, total_steps=50)
    console.step(metrics(1))
    console.say("saved step 1")
    console.finish()
    assert "\x1b[" in stream.getvalue()
    assert "saved step 1" in stream.getvalue()


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_terminal_that_was_closed_does_not_stop_the_run() -> None:
    console = Console(stream=Closed(), total_steps=50, plain_seconds=0.0)
    console.step(metrics(1))
    console.say("saved")
    console.finish()


def test_time_to_go_is_to_where_this_process_stops() -> None:
    stream = io.StringIO()
    console = Console(stream=stream, total_steps=50, end_step=9)
    console.step(metrics(7, seconds=2.0) | {"of_prediction": None})
    assert stream.getvalue().rstrip().endswith("ETA 4.00 s")


def test_time_to_go_is_that_of_steps_that_are_like_those_to_come() -> None:
    """A first step, which may have compiled, is until there is another, whatever was predicted; one that was held up is
    not; a last one has no time to go."""
    stream = io.StringIO()
    console = Console(stream=stream, total_steps=6, plain_seconds=0.0)
    console.step(metrics(1, seconds=30.0))
    for step, seconds in ((2, 2.0), (3, 50.0), (4, 2.0), (5, 2.0), (6, 2.0)):
        console.step(metrics(step, seconds=seconds))
    left = [line.partition("ETA ")[2] for line in stream.getvalue().splitlines()]
    assert left == ["2 min 30 s", "8.00 s", "6.00 s", "4.00 s", "2.00 s", ""]
