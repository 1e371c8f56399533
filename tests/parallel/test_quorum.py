"""Rounds that a quorum of learners ends: equal to those of all where all come, and to one device where some do not."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch.distributed as dist

from meshwright.parallel.outer import Round
from meshwright.parallel.outer import roll as rolls
from meshwright.parallel.outer.roll import Arrival, Roll, Terms
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.synchronize import PACKINGS, SyncKind
from tests.parallel import outer_cases, quorum_cases
from tests.parallel.quorum_cases import with_quorum
from tests.parallel.test_outer import LAYOUTS, met
from tests.support.designs import Layout
from tests.support.pool import Pool

EXACT = 1e-12
THREE = Layout(replicate=3, batch=12)
SHARDED = Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS, batch=8)


@pytest.mark.parametrize(
    ("layout", "kind", "precision"),
    [
        ("replicas", SyncKind.DILOCO, Precision.FP64),
        ("sharded", SyncKind.DILOCO, Precision.FP64),
        pytest.param("replicas", SyncKind.LOCAL, Precision.FP64, marks=pytest.mark.slow),
        pytest.param("pipeline", SyncKind.DILOCO, Precision.FP64, marks=pytest.mark.slow),
        pytest.param("tensor", SyncKind.LOCAL, Precision.FP64, marks=pytest.mark.slow),
        pytest.param("sharded", SyncKind.DILOCO, Precision.INT4, marks=pytest.mark.slow),
    ],
)
def test_a_quorum_of_all_is_what_learners_do_without_one(
    pool: Pool, layout: str, kind: SyncKind, precision: Precision
) -> None:
    entry, ranks = narrow(met(LAYOUTS[layout], kind), precision), LAYOUTS[layout].ranks
    plain = pool.run(outer_cases.trained, entry, 8, ranks=ranks)
    quorum = pool.run(outer_cases.trained, with_quorum(entry, 2), 8, ranks=ranks)
    for (_, own, mean), (_, other, together) in zip(plain, quorum, strict=True):
        assert all(numpy.array_equal(own[name], other[name]) for name in own)
        assert all(numpy.array_equal(mean[name], together[name]) for name in mean)


@pytest.mark.parametrize(
    ("layout", "kind", "quorum", "slow", "precision"),
    [
        (THREE, SyncKind.DILOCO, 2, 1, Precision.INT4),
        (SHARDED, SyncKind.DILOCO, 1, 0, Precision.FP64),
        pytest.param(THREE, SyncKind.DILOCO, 2, 1, Precision.FP64, marks=pytest.mark.slow),
        pytest.param(THREE, SyncKind.DILOCO, 2, 0, Precision.INT8, marks=pytest.mark.slow),
        pytest.param(LAYOUTS["replicas"], SyncKind.LOCAL, 1, 0, Precision.INT8, marks=pytest.mark.slow),
        pytest.param(THREE, SyncKind.LOCAL, 1, 0, Precision.FP64, marks=pytest.mark.slow),
        pytest.param(LAYOUTS["pipeline"], SyncKind.DILOCO, 1, 1, Precision.FP64, marks=pytest.mark.slow),
        pytest.param(LAYOUTS["tensor"], SyncKind.DILOCO, 1, 1, Precision.FP64, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_learner_that_misses_rounds_brings_what_it_learnt_and_takes_the_newer_state(
    pool: Pool, layout: Layout, kind: SyncKind, quorum: int, slow: int, precision: Precision
) -> None:
    """By the record of who came, what all go from is that of one device that does what the rule says."""
    entry, rounds = with_quorum(narrow(met(layout, kind), precision), quorum, grace_seconds=0.05), 5
    answers = pool.run(quorum_cases.met_without, entry, slow, 3, rounds, ranks=layout.ranks)
    told = {entry["round"]: Round.of(entry) for _, _, met_in, _ in answers for entry in met_in}
    assert sorted(told) == list(range(1, rounds + 1))
    for learner, _, met_in, sent in answers:
        if layout.ranks == entry.plan.learners and precision in PACKINGS:
            assert sent == [among(entry, told[number["round"]]) for number in met_in]
        assert [entry["round"] for entry in met_in] == [n for n in sorted(told) if learner in told[n].arrivals]
        assert all(Round.of(entry) == told[entry["round"]] for entry in met_in)
    assert all(slow not in told[number].arrivals for number in (1, 2))
    first = min(number for number in told if slow in told[number].arrivals)
    assert told[first].late(slow) == first - 1
    assert told[rounds].members == tuple(range(entry.plan.learners))
    wanted = quorum_cases.reference(entry, [told[number] for number in sorted(told)])
    for _, own, _, _ in answers:
        for name, value in own.items():
            numpy.testing.assert_allclose(value, wanted[name], rtol=0, atol=EXACT, err_msg=name)


def narrow(entry: Design, precision: Precision) -> Design:
    """The same, whose learners send numbers of `precision`."""
    gradients = entry.plan.gradients
    rounds = replace(gradients.rounds, precision=precision)
    return replace(entry, plan=replace(entry.plan, gradients=replace(gradients, rounds=rounds)))


def among(entry: Design, found: Round) -> int:
    """Bytes that each of those that came sends to the others of them, where some did not come."""
    packing, count = PACKINGS[entry.plan.gradients.rounds.precision], len(found.members)
    whole = count == entry.plan.learners
    return 0 if whole else 2 * (count - 1) * packing.part_bytes(-(-entry.model.parameters // count))


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_what_rounding_left_of_rounds_that_some_missed_is_gone_on_with_bit_by_bit(
    pool: Pool, tmp_path: Path, precision: Precision
) -> None:
    entry = with_quorum(narrow(met(THREE, SyncKind.DILOCO), precision), 2)
    assert all(pool.run(quorum_cases.resumed_after_absence, entry, 1, str(tmp_path), ranks=3))


def test_a_run_with_a_quorum_goes_on_bit_by_bit_from_the_middle_of_a_round(pool: Pool, tmp_path: Path) -> None:
    entry = with_quorum(met(LAYOUTS["replicas"], SyncKind.DILOCO), 2)
    assert all(pool.run(outer_cases.resumed, entry, str(tmp_path), 5, 8, ranks=2))


def test_learners_that_come_from_unlike_parameters_are_named(pool: Pool) -> None:
    entry = with_quorum(met(LAYOUTS["replicas"], SyncKind.DILOCO), 1, grace_seconds=30.0)
    for told in pool.run(quorum_cases.spoilt_while_away, entry, ranks=2):
        assert "learners 0 and 1 came to round 1 from unlike parameters" in told


def arrival(steps: int = 4, base: int = 0, *, stop: bool = False) -> Arrival:
    return Arrival(steps=steps, base=base, fingerprint=7, stop=stop)


def roll(store: dist.Store, *, quorum: int = 2, grace: float = 0.0, patience: float = 5.0) -> Roll:
    terms = Terms(learners=3, quorum=quorum, grace_seconds=grace, patience_seconds=patience)
    return Roll(store, name="roll", terms=terms, first=1)


def come(
    store: dist.Store, arrivals: dict[int, Arrival], *, with_all: bool = False, quorum: int = 2, grace: float = 0.0
) -> list[Round]:
    """The rounds that these learners are in, who come at once."""
    found: list[Round] = []

    def one(learner: int, entry: Arrival) -> None:
        found.append(roll(store, quorum=quorum, grace=grace).come(learner, entry, with_all=lambda _: with_all))

    threads = [threading.Thread(target=one, args=entry) for entry in arrivals.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class Clock:
    """Time that passes while somebody sleeps, and not else."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_who_does_not_come_is_waited_for_no_longer_than_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = dist.HashStore(), Clock()
    monkeypatch.setattr(rolls, "time", clock)
    found = roll(store, quorum=1, grace=0.2).come(2, arrival(), with_all=lambda _: False)
    assert 0.2 <= clock.now < 0.23
    assert found.members == (2,)
    assert roll(store).open().number == 2


def test_who_came_is_together_in_the_round_that_ends() -> None:
    found = come(dist.HashStore(), {0: arrival(), 2: arrival()}, grace=0.2)
    assert [entry.members for entry in found] == [(0, 2)] * 2


@pytest.mark.parametrize(("with_all", "stop"), [(True, False), (False, True)])
def test_a_round_waits_for_all_where_all_are_needed_and_where_one_is_to_stop(with_all: bool, stop: bool) -> None:
    store, found = dist.HashStore(), list[Round]()
    first = {0: arrival(stop=stop), 2: arrival()}
    waits = threading.Thread(target=lambda: found.extend(come(store, first, with_all=with_all)))
    waits.start()
    time.sleep(0.1)
    assert roll(store).open().members == (0, 2)
    found.extend(come(store, {1: arrival(1)}))
    waits.join()
    assert [entry.members for entry in found] == [(0, 1, 2)] * 3


def test_a_round_does_not_end_without_one_that_has_what_all_go_from() -> None:
    store = dist.HashStore()
    come(store, {0: arrival()}, quorum=1)
    found = list[Round]()
    waits = threading.Thread(target=lambda: found.extend(come(store, {1: arrival(6), 2: arrival(5)}, quorum=1)))
    waits.start()
    time.sleep(0.1)
    assert roll(store).open().members == (1, 2)
    found.extend(come(store, {0: arrival(base=1)}, quorum=1))
    waits.join()
    assert {(entry.number, entry.members, entry.donor, entry.late(1)) for entry in found} == {(2, (0, 1, 2), 0, 1)}


def test_who_waits_in_vain_says_for_whom() -> None:
    with pytest.raises(RuntimeError, match="timed out waiting for learners 0, 2 in round 1"):
        roll(dist.HashStore(), patience=0.05).come(1, arrival(), with_all=lambda _: False)


def test_what_is_late_counts_less_and_what_is_even_counts_one() -> None:
    even = Round(number=3, arrivals={each: arrival(7, base=2) for each in range(3)})
    assert [even.scale(each) for each in range(3)] == [1.0, 1.0, 1.0]
    uneven = Round(number=3, arrivals={0: arrival(6, base=2), 1: arrival(4, base=2), 2: arrival(4, base=-1)})
    assert [uneven.scale(each) for each in range(3)] == pytest.approx([1.5, 1.0, 0.5])
    assert Round.of(uneven.to_dict()) == uneven
