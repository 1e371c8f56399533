"""Detectors on made-up traces: every slow rank in time, and nothing where nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from meshwright.spec.plan import AxisName
from meshwright.train.observe.slowness import (
    PAST,
    WINDOW,
    Communication,
    DataWaits,
    Finding,
    SlowRanks,
    median_of_others,
    peers_of,
)
from tests.support import designs, models
from tests.support.designs import Layout
from tests.train.observe.traces import FloatArray, own_seconds

ONSET = 60
LIMIT = 20
SEEDS, FEW = 200, 12


def findings(own: FloatArray, peers: Sequence[int]) -> Iterator[tuple[int, Finding]]:
    watch = SlowRanks(peers)
    for step, row in enumerate(own):
        for found in watch.see(row.tolist(), step_seconds=float(row.max()) * 1.2):
            yield step, found


@pytest.mark.parametrize(
    ("ranks", "peers", "seeds"),
    [
        (8, "alike", FEW),
        (4, "alone", FEW),
        pytest.param(8, "alike", SEEDS, marks=pytest.mark.slow),
        pytest.param(4, "alike", SEEDS, marks=pytest.mark.slow),
        pytest.param(4, "alone", SEEDS, marks=pytest.mark.slow),
    ],
)
def test_a_rank_slower_by_three_tenths_is_found_within_twenty_steps(ranks: int, peers: str, seeds: int) -> None:
    caught = wrong = 0
    labels = [0] * ranks if peers == "alike" else list(range(ranks))
    shares = np.ones(ranks) if peers == "alike" else np.linspace(1.0, 2.5, ranks)
    for seed in range(seeds):
        own = own_seconds(ranks, ONSET + LIMIT, seed=seed) * shares
        own[ONSET:, seed % ranks] *= 1.3
        found = [(step, each) for step, each in findings(own, labels) if each.begins]
        caught += any(each.ranks == (seed % ranks,) and step >= ONSET for step, each in found)
        wrong += sum(each.ranks != (seed % ranks,) or step < ONSET for step, each in found)
    assert caught >= 0.95 * seeds
    assert wrong == 0


@pytest.mark.parametrize(
    ("ranks", "peers", "seeds", "steps"),
    [
        (4, "alike", 1, 1500),
        (4, "alone", 1, 1500),
        pytest.param(8, "alike", 8, 5000, marks=pytest.mark.slow),
        pytest.param(2, "alike", 8, 5000, marks=pytest.mark.slow),
        pytest.param(4, "alone", 8, 5000, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_told_of_clean_steps(ranks: int, peers: str, seeds: int, steps: int) -> None:
    labels = [0] * ranks if peers == "alike" else list(range(ranks))
    for seed in range(seeds):
        assert not list(findings(own_seconds(ranks, steps, seed=1000 + seed), labels))


@pytest.mark.slow
def test_noise_that_comes_in_stretches_is_no_fault() -> None:
    """Ranks that wander by a twentieth for fifty steps at a time are not slow."""
    told = sum(len(list(findings(own_seconds(4, 5000, seed=seed, wander=0.05), [0] * 4))) for seed in range(6))
    assert told == 0


def test_a_rank_that_was_slow_from_the_start_is_found_and_told_well_again() -> None:
    own = own_seconds(4, 200, seed=3)
    own[:100, 2] *= 1.6
    began, ended = findings(own, [0] * 4)
    assert began[1].begins
    assert not ended[1].begins
    assert began[0] < WINDOW + LIMIT
    assert began[1].ratio == pytest.approx(1.6, rel=0.15)
    assert 100 < ended[0] < 100 + LIMIT + WINDOW


def test_a_rank_that_is_slow_again_and_again_is_found_each_time() -> None:
    """Forty of every ninety steps: what was told to be slow is not taken for what steps vary by."""
    begins, caught = range(60, 1500, 90), 0
    for seed in range(4):
        own = own_seconds(4, 1500, seed=seed)
        for number, begin in enumerate(begins):
            own[begin : begin + 40, number % 4] *= 1.3
        found = [(step, each.ranks) for step, each in findings(own, [0] * 4) if each.begins]
        for number, begin in enumerate(begins):
            caught += any(begin < step <= begin + LIMIT and who == (number % 4,) for step, who in found)
    assert caught >= 0.95 * 4 * len(begins)


def test_two_slow_ranks_of_eight_are_both_named() -> None:
    own = own_seconds(8, 120, seed=5)
    own[ONSET:, [1, 6]] *= 1.5
    assert {each.ranks for _, each in findings(own, [0] * 8) if each.begins} == {(1,), (6,)}


def test_what_is_uneven_by_design_is_not_slow() -> None:
    """Stages of one rank each, the last three times as busy as the first; and two of two ranks each."""
    own = own_seconds(4, 400, seed=11)
    assert not list(findings(own * np.array([1.0, 1.2, 1.4, 3.0]), [0, 1, 2, 3]))
    assert not list(findings(own * np.array([1.0, 1.0, 2.0, 2.0]), [0, 0, 1, 1]))


def test_what_matters_to_no_step_is_not_told() -> None:
    own = own_seconds(4, 200, seed=2, usual=1e-3)
    own[:, 1] *= 1.5
    watch = SlowRanks([0] * 4)
    assert not [found for row in own for found in watch.see(row.tolist(), step_seconds=0.5)]


def test_a_rank_that_waits_for_data_is_told_as_that() -> None:
    waits, own = np.full((120, 3), 1e-4), own_seconds(3, 120, seed=4)
    waits[50:90, 1] = 0.04
    data, ranks = DataWaits(), SlowRanks([0] * 3)
    told = []
    for step in range(120):
        told += [(step, found) for found in data.see(waits[step].tolist(), step_seconds=0.1)]
        assert not ranks.see(own[step].tolist(), step_seconds=0.1)
    (began, first), (ended, last) = told
    assert first.ranks == (1,)
    assert first.ratio == pytest.approx(0.4, rel=0.1)
    assert 50 < began <= 50 + LIMIT
    assert not last.begins
    assert 90 < ended <= 90 + LIMIT


def waited(own: FloatArray, network: FloatArray) -> FloatArray:
    """What ranks wait for the busiest one and then for the network."""
    found: FloatArray = own.max(axis=1, keepdims=True) - own + network[:, None]
    return found


def test_a_slow_network_is_told_from_a_slow_rank() -> None:
    own = own_seconds(4, 200, seed=7)
    network = 0.02 * np.exp(0.1 * np.random.default_rng(1).standard_normal(200))
    slower = network.copy()
    slower[80:140] *= 3.0
    told = list(rises(waited(own, slower)))
    assert [found.begins for _, found in told] == [True, False]
    assert 80 < told[0][0] <= 80 + LIMIT
    lame = own.copy()
    lame[80:, 2] *= 1.6
    assert not list(rises(waited(lame, network)))


@pytest.mark.parametrize(("seeds", "steps"), [(1, 1500), pytest.param(4, 5000, marks=pytest.mark.slow)])
def test_the_network_of_clean_steps_has_not_risen(seeds: int, steps: int) -> None:
    for seed in range(seeds):
        network = 0.02 * np.exp(0.25 * np.random.default_rng(seed).standard_normal(steps))
        assert not list(rises(waited(own_seconds(4, steps, seed=seed), network)))


def rises(waits: FloatArray) -> Iterator[tuple[int, Finding]]:
    communication = Communication()
    for step, row in enumerate(waits):
        for found in communication.see(row.tolist(), step_seconds=0.08):
            yield step, found


def test_the_past_is_known_before_anything_is_held_against_it() -> None:
    communication = Communication()
    for step in range(PAST):
        assert not communication.see([0.001 * 2**step] * 2, step_seconds=1.0)


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_the_median_of_others(count: int) -> None:
    values = np.random.default_rng(count).standard_normal((5, count))
    expected = [[np.median(np.delete(row, rank)) for rank in range(count)] for row in values]
    assert median_of_others(values) == pytest.approx(np.array(expected))


def test_peers_have_the_same_work() -> None:
    pipelined = designs.design(models.model(), Layout(pipeline=2, shard=2, batch=8))
    assert peers_of(pipelined) == (0, 0, 1, 1)
    context = designs.design(models.model(), Layout(shard=2, context=2, batch=8))
    places = peers_of(context)
    assert len(set(places)) == context.plan.size(AxisName.CONTEXT)
