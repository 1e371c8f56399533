"""The probability of fitting: one half on the line, and more where there is more room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import predict
from meshwright.cost.fitting import SPREADS, Held, chance, probability, shares, spread
from meshwright.spec.report import MemoryPart
from tests.cost.cost_examples import design, llama, selene, with_group

FITS = 0.5  # a plan fits when it is at least as likely to fit as not


def one(state: float, kept: float, *, capacity: float) -> float:
    memory = {MemoryPart.PARAMETERS: np.array([[state]]), MemoryPart.ACTIVATIONS: np.array([[kept]])}
    return float(probability(memory, capacity=np.array([[capacity]]), valid=np.array([[True]]))[0])


def test_on_the_line_it_is_even_and_that_is_the_verdict():
    assert one(10.0, 20.0, capacity=30.0) == pytest.approx(FITS)
    assert one(10.0, 20.0, capacity=31.0) > FITS > one(10.0, 20.0, capacity=29.0)


def test_what_is_told_more_narrowly_is_surer():
    state, kept = (30.0, 0.0), (0.0, 30.0)
    narrow, wide = (state, kept) if SPREADS[Held.STATE] < SPREADS[Held.KEPT] else (kept, state)
    assert one(*narrow, capacity=36.0) > one(*wide, capacity=36.0) > 0.5
    assert one(*narrow, capacity=25.0) < one(*wide, capacity=25.0) < 0.5


def test_the_fullest_rank_decides_and_ranks_that_are_not_there_do_not():
    memory = {MemoryPart.PARAMETERS: np.array([[10.0, 30.0, 99.0]])}
    capacity = np.full((1, 3), 30.0)
    valid = np.array([[True, True, False]])
    assert float(probability(memory, capacity=capacity, valid=valid)[0]) == pytest.approx(0.5)


def test_shares_are_of_the_whole():
    memory = {part: np.array([[1.0]]) for part in MemoryPart}
    found = shares(memory)
    assert sum(float(found[part][0, 0]) for part in Held if part is not Held.WHOLE) == pytest.approx(1.0)
    assert float(found[Held.WHOLE][0, 0]) == 1.0
    assert float(spread(memory)[0, 0]) > SPREADS[Held.WHOLE]


def test_a_logistic_variable_of_deviation_one():
    at = np.linspace(-40.0, 40.0, 200_001)
    density = np.diff(chance(at)) / np.diff(at)
    middle = (at[1:] + at[:-1]) / 2.0
    assert float(np.sum(density * np.diff(at))) == pytest.approx(1.0)
    assert float(np.sum(middle**2 * density * np.diff(at))) == pytest.approx(1.0, rel=1e-4)


@given(st.floats(1.0, 1e12), st.floats(1.0, 1e12))
def test_more_room_is_never_less_likely(need, room):
    first, second = (one(need, need, capacity=capacity) for capacity in (room, 1.5 * room))
    assert 0.0 <= first <= second <= 1.0


def test_a_report_says_so_and_agrees_with_its_verdict():
    cluster = selene(nodes=1)
    roomy = predict(design(llama(), cluster))
    assert roomy.fits
    assert roomy.fit_probability is not None
    assert roomy.fit_probability > 0.99
    device = cluster.groups[0].device
    for share in (0.5, 0.9, 1.1, 2.0):
        need = roomy.peak_bytes * share / device.usable_fraction
        tight = with_group(cluster, device=replace(device, memory_bytes=need))
        report = predict(design(llama(), tight))
        assert report.fit_probability is not None
        assert report.fits is (report.fit_probability >= FITS)


def test_a_host_without_room_for_what_is_offloaded_makes_a_plan_unlikely_to_fit() -> None:
    memory = {MemoryPart.ACTIVATIONS: np.full((3, 1), 1e9)}
    held = {"capacity": np.full((3, 1), 1e11), "valid": np.ones((3, 1), dtype=np.bool_)}
    host, room = np.array([[0.0], [5e10], [2e11]]), np.full((3, 1), 1e11)
    empty, roomy, crowded = probability(memory, **held, host=host, host_room=room).tolist()
    assert empty > 0.999
    assert empty >= roomy > 0.99
    assert crowded < 0.01
    assert probability(memory, **held).tolist() == pytest.approx([empty] * 3)
