from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import units
from meshwright.spec.units import Measure


@pytest.mark.parametrize(
    ("text", "measure", "number"),
    [
        ("80GiB", Measure.BYTES, 80 * 2**30),
        ("80 GB", Measure.BYTES, 80e9),
        ("4Mi", Measure.PLAIN, 4 * 2**20),
        ("4M", Measure.PLAIN, 4e6),
        ("1_000", Measure.PLAIN, 1000),
        ("450GB/s", Measure.RATE, 450e9),
        ("400Gbit/s", Measure.RATE, 50e9),
        ("312TFLOP/s", Measure.FLOPS, 312e12),
        ("312TFLOPS", Measure.FLOPS, 312e12),
        ("15us", Measure.SECONDS, 15e-6),
        ("3h", Measure.SECONDS, 10800),
        ("2 d", Measure.SECONDS, 172800),
        ("1.5e12", Measure.PLAIN, 1.5e12),
        ("-3", Measure.PLAIN, -3),
        *(("7", measure, 7) for measure in Measure),
    ],
)
def test_quantities_are_read_in_base_units(text: str, measure: Measure, number: float) -> None:
    assert units.parse_measure(text, measure) == pytest.approx(number)


@pytest.mark.parametrize("measure", Measure)
@pytest.mark.parametrize("text", ["", "fast", "12 parsecs", "1.2.3", "GiB", "4 XiB"])
def test_what_is_no_quantity_is_refused(text: str, measure: Measure) -> None:
    with pytest.raises(ValueError, match="not a"):
        units.parse_measure(text, measure)


@pytest.mark.parametrize(
    ("text", "measure", "fix"),
    [
        ("5GB", Measure.RATE, "write 5GB/s"),
        ("5 GiB ", Measure.RATE, "write 5 GiB/s"),
        ("989TFLOP", Measure.FLOPS, "write 989TFLOP/s"),
        ("80GB/s", Measure.BYTES, "write 80GB"),
        ("80Gbit/s", Measure.BYTES, "write for example 80GiB or 512MB"),
        ("80GB", Measure.FLOPS, "write for example 989TFLOP/s"),
        ("80GB/s", Measure.FLOPS, "write for example 989TFLOP/s"),
        ("5ms", Measure.RATE, "write for example 450GB/s or 400Gbit/s"),
        ("5GFLOP", Measure.RATE, "write for example 450GB/s or 400Gbit/s"),
    ],
)
def test_the_unit_of_another_measure_is_refused_with_the_nearest_that_is_one(
    text: str, measure: Measure, fix: str
) -> None:
    with pytest.raises(units.NotRead) as caught:
        units.parse_measure(text, measure)
    assert caught.value.what == f"{text.strip()!r} is not {measure.value}"
    assert caught.value.fix == fix


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1" * 400, "1e308 EB"])
def test_a_number_that_no_computer_has_is_told_as_it_was_typed(text: str) -> None:
    with pytest.raises(units.NotRead, match=f"^'{text[:100]}'(\\.\\.\\.)? is too large for any computer$"):
        units.parse_measure(text, Measure.BYTES)


@pytest.mark.parametrize(("text", "number"), [("4Mi", 2**22), ("300G", 3e11), ("4Mi tokens", 2**22), ("12", 12)])
def test_counts_are_read_with_their_prefix_alone(text: str, number: float) -> None:
    assert units.parse_count(text) == number


@pytest.mark.parametrize("text", ["2s", "4MB", "15B", "1min", "8GiB", "4GFLOP", "1Gbit/s"])
def test_a_count_in_another_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a count is expected"):
        units.parse_count(text)


def test_times_are_in_a_unit_of_time_or_plain_seconds() -> None:
    assert units.parse_seconds("15us") == pytest.approx(15e-6)
    assert units.parse_seconds("1.5") == 1.5
    with pytest.raises(ValueError, match="'5GB' is not a time"):
        units.parse_seconds("5GB")


@given(st.floats(min_value=1, max_value=1e15))
def test_bytes_read_back_within_their_three_figures(count: float) -> None:
    written = units.format_bytes(count)
    assert units.parse_measure(written.replace(",", ""), Measure.BYTES) == pytest.approx(count, rel=6e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.31e-3, "2.31 ms"), (0.5, "500 ms"), (3.333, "3.33 s"), (3661, "61 min 1 s"), (200000, "2 d 8 h")],
)
def test_seconds_read_well(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text
    assert units.format_seconds(-seconds) == f"-{text}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (127.51, "2 min 8 s"),
        (758.62, "12 min 39 s"),
        (19 * 86400 + 20.96 * 3600, "19 d 21 h"),
        (119.7, "2 min 0 s"),
        (7199.7, "2 h 0 min"),
        (47 * 3600 + 59.6 * 60, "2 d 0 h"),
        (0.99996, "1.00 s"),
    ],
)
def test_durations_are_rounded_and_not_cut(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (83.2, 195.0, "1 min 23 s to 3 min 15 s"),
        (45.0, 195.0, "45.0 s to 195 s"),
        (0.9, 1.1, "900 ms to 1,100 ms"),
        (110 * 60.0, 130 * 60.0, "1 h 50 min to 2 h 10 min"),
        (2.0, 3.0, "2.00 s to 3.00 s"),
        (0.0, 3.0, "0 s to 3.00 s"),
        (2.0, math.inf, "2.00 s to never"),
    ],
)
def test_both_ends_of_an_interval_are_in_like_units(low: float, high: float, text: str) -> None:
    assert units.format_interval(low, high) == text


def test_a_change_of_more_than_twice_is_told_in_times() -> None:
    assert units.format_change(0.12, noun="time", than="this") == "12.0 % more time than this"
    assert units.format_change(-0.12) == "12.0 % less"
    assert units.format_change(4.91, noun="time", than="this") == "5.91 times the time of this"
    assert units.format_change(4.91) == "5.91 times"


def test_what_never_ends_says_so() -> None:
    assert units.format_seconds(math.inf) == "never"
    assert units.format_bytes(math.nan) == "unknown"


def test_counts_and_percent() -> None:
    assert units.format_count(8_030_261_248) == "8.03 B"
    assert units.format_flops(312e12) == "312 TFLOP"
    assert units.format_percent(0.4205) == "42.0 %"
    assert [units.format_percent(x) for x in (-1e-6, -0.0006, -0.1, -1.0)] == ["0.0 %", "-0.1 %", "-10.0 %", "-100.0 %"]
    least = units.LEAST_SHARE
    assert [units.format_percent(x) for x in (0.999 * least, 1.001 * least)] == ["0.0 %", "0.1 %"]
    assert [units.format_seconds(x) for x in (-1e-12, -6e-9, -1e-3)] == ["0 us", "-0.01 us", "-1.00 ms"]
