"""Stretches of a step join, repeat and extend as the events they are made of do."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.run.dry.events import Event, Kind
from meshwright.run.dry.extend import NotSteady, extended
from meshwright.run.dry.tally import joined, tally

amounts = st.integers(-5, 5).map(float)
event = st.one_of(
    st.builds(Event, st.just(Kind.MEMORY), st.sampled_from(["a", "b"]), amounts),
    st.builds(Event, st.just(Kind.FLOPS), st.just("forward"), st.just(3.0)),
    st.builds(Event, st.just(Kind.COLLECTIVE), st.just("line|op|axis"), st.just(7.0)),
)
events = st.lists(event, max_size=12)


def figures(stretch):
    kept = {part: amount for part, amount in stretch.net.items() if amount}
    return kept, stretch.rise, stretch.flops, stretch.calls, stretch.bytes


@given(events, events, events)
def test_stretches_join_end_to_end(one, two, three):
    whole = tally([*one, *two, *three])
    assert figures(joined([tally(one), tally(two), tally(three)])) == figures(whole)
    assert figures(joined([tally(one), joined([tally(two), tally(three)])])) == figures(whole)


@given(events, st.integers(0, 6))
def test_a_stretch_repeats(one, count):
    assert figures(tally(one).times(count)) == figures(tally(one * count))


@given(events, events, events, events, events, st.integers(0, 9))
def test_what_each_repetition_adds_in_two_places_is_found(before, unit, between, other, after, more):
    def run(count):
        return [*before, *unit * count, *between, *other * count, *after]

    found = extended(run(2), run(4), more)
    assert figures(found) == figures(tally(run(2 + more)))


def test_amounts_that_do_not_grow_evenly_are_not_extended():
    with pytest.raises(NotSteady):
        extended([Event(Kind.MEMORY, "a", 1.0)], [Event(Kind.MEMORY, "a", 4.0)], 3)


def test_amounts_that_grow_by_as_much_are_extended():
    def run(count):
        each = [Event(Kind.MEMORY, "a", 4.0)] * count
        return [Event(Kind.MEMORY, "a", 10.0 * count), *each, Event(Kind.MEMORY, "a", -10.0 * count)]

    assert figures(extended(run(2), run(4), 20)) == figures(tally(run(22)))


@pytest.mark.parametrize("sizes", [(1, 2), (3, 1)])
def test_what_is_not_steady_is_not_extended(sizes):
    with pytest.raises(NotSteady):
        extended(*([Event(Kind.FLOPS, "forward", 1.0)] * size for size in sizes), 3)


def test_a_unit_that_changes_is_not_steady():
    def run(count):
        return [Event(Kind.MEMORY, "a", float(index**2)) for index in range(1, count + 1)]

    with pytest.raises(NotSteady):
        extended(run(2), run(4), 3)


def test_the_moment_of_most_is_told_by_part():
    found = tally([Event(Kind.MEMORY, "a", 3.0), Event(Kind.MEMORY, "b", 4.0), Event(Kind.MEMORY, "a", -3.0)])
    assert found.top == {"a": 3.0, "b": 4.0}
    assert dict(itertools.chain(found.on({"a": 1.0}).items())) == {"a": 4.0, "b": 4.0}
