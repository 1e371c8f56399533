from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.report import svg


def test_text_and_attributes_are_escaped() -> None:
    made = svg.element("rect", title="a < b & c", class_="x y", stroke_width=2, aria_label='"q"', left_out=None)
    root = ElementTree.fromstring(made)
    assert root.attrib == {"class": "x y", "stroke-width": "2", "aria-label": '"q"'}
    assert root[0].text == "a < b & c"


@example(low=879610.0, width=1e-6, count=8)
@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-6, 1e6), count=st.integers(2, 8))
def test_ticks_are_round_inside_and_about_as_many_as_asked(low: float, width: float, count: int) -> None:
    scale = svg.Scale(low=low, high=low + width)
    ticks = scale.ticks(count)
    assert all(-1e-6 <= scale(tick) <= 1 + 1e-6 for tick in ticks)
    assert len(ticks) <= count + 1


def test_a_range_that_no_round_step_divides_into_four_has_more_ticks_and_not_two() -> None:
    """A loss from 8.3 to 4.8 with its margins, and memory from 280 to 392 MiB."""
    assert svg.Scale(low=4.5, high=8.6).ticks(4) == [5.0, 6.0, 7.0, 8.0]
    assert svg.Scale(low=278.0, high=393.0).ticks(4) == [300.0, 325.0, 350.0, 375.0]


def test_a_scale_shows_one_value_and_none() -> None:
    assert 0.0 <= svg.Scale.over([5.0])(5.0) <= 1.0
    assert svg.Scale.over([0.0, 0.0])(0.0) >= 0.0
    assert svg.Scale.over([]).high > svg.Scale.over([]).low
    assert svg.Scale.over([float("nan"), 1.0, 3.0], margin=0.0).high == 3.0
    assert svg.Scale.over([2.0, 3.0], zero=True).low == 0.0
    for values in ([5e-324], [3.0, 3.0], [0.0, 5e-324], [1e-310, 3e-310], [-2e-200, 1e-200]):
        assert 0.0 <= svg.Scale.over(values)(values[-1]) <= 1.0
        assert svg.Scale.over(values).ticks(4)
        assert svg.Scale.over(values, margin=0.0)(values[-1]) == 0.5
    assert svg.Scale.over([-1.7e308, 1.0, 1.7e308]).ticks(4) == svg.Scale.over([1.0]).ticks(4)


def test_thinning_keeps_ends_and_extremes() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[7000] = (7000.0, -99.0)
    kept = svg.thinned(points, most=100)
    assert len(kept) <= 102
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert points[4321] in kept
    assert points[7000] in kept
    assert svg.thinned(points[:50], most=100) == points[:50]


def test_stripes_are_one_shape() -> None:
    made = ElementTree.fromstring(svg.stripes([[0.0, 0.5], [0.6, 0.6]], top=3, height=10, kind="c-forward"))
    assert len(made) == 1
    assert made[0].attrib["d"].count("M") == 2
    assert "h5000" in made[0].attrib["d"]
    assert "M6000 0h1v" in made[0].attrib["d"]
