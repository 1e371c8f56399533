from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import units


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GB", 80e9),
        ("4Mi", 4 * 2**20),
        ("4M", 4e6),
        ("1_000", 1000),
        ("450GB/s", 450e9),
        ("400Gbit/s", 50e9),
        ("312TFLOP/s", 312e12),
        ("15us", 15e-6),
        ("3h", 10800),
        ("2 d", 172800),
        ("1.5e12", 1.5e12),
        ("-3", -3),
        ("7", 7),
    ],
)
def test_quantities_are_read_in_base_units(text: str, number: float) -> None:
    assert units.parse_quantity(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "fast", "12 parsecs", "1.2.3", "GiB", "4 XiB"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        units.parse_quantity(text)


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
    assert units.parse_quantity(written.replace(",", "")) == pytest.approx(count, rel=6e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.31e-3, "2.31 ms"), (0.5, "500 ms"), (3.333, "3.33 s"), (3661, "61 min 1 s"), (200000, "2 d 7 h")],
)
def test_seconds_read_well(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text
    assert units.format_seconds(-seconds) == f"-{text}"


def test_what_never_ends_says_so() -> None:
    assert units.format_seconds(math.inf) == "never"
    assert units.format_bytes(math.nan) == "unknown"


def test_counts_and_percent() -> None:
    assert units.format_count(8_030_261_248) == "8.03 B"
    assert units.format_flops(312e12) == "312 TFLOP"
    assert units.format_percent(0.4205) == "42.0 %"
