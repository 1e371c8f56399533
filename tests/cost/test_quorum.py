"""Rounds that a quorum of unlike learners ends: how long they are, against learners followed step by step."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from meshwright.cost import predict
from meshwright.cost.quorum import paces
from meshwright.cost.ways import ways_of_meeting
from meshwright.report.meetings import meetings
from meshwright.spec.cluster import Link
from meshwright.spec.plan import AxisName, Sharding
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import GradientSync, Rounds, SyncKind
from tests.cost.cost_examples import design, llama, selene

MODEL = llama(width=512, layers=8, hidden=2048, vocab=32000)


def followed(seconds, rounds, number):
    """Seconds and steps by learner of a round on average, over `number` rounds of learners that look after each of
    their steps whether they are called, as `parallel/outer` has them, where meeting takes no time."""
    learners = range(len(seconds))
    ends, since, base, steps = list(seconds), [0] * len(seconds), [0] * len(seconds), [0] * len(seconds)
    here, called, open_ = set(), inf, 1
    while open_ <= number:
        now, index = min((ends[each], each) for each in learners if each not in here)
        closes = called + rounds.grace_seconds
        if closes < now or len(here) == len(seconds) - 1:
            if closes >= now:
                here.add(index)
                since[index] += 1
            over = min(closes, now)
            for each in here:
                steps[each] += since[each]
                ends[each], since[each], base[each] = over + seconds[each], 0, open_
            here, called, open_ = set(), inf, open_ + 1
            continue
        since[index] += 1
        ends[index] += seconds[index]
        if called < inf or base[index] * rounds.every + since[index] >= open_ * rounds.every:
            here.add(index)
            fresh = any(base[each] == open_ - 1 for each in here)
            called = min(called, now) if fresh and len(here) >= rounds.quorum else called
    return over / number, [count / number for count in steps]


@pytest.mark.parametrize(
    ("seconds", "quorum", "grace"),
    [
        ((1.0, 1.0, 1.0), 2, 0.5),
        ((1.0, 1.0, 2.0), 2, 2.0),
        ((1.0, 1.1, 1.7, 3.0), 2, 3.0),
        ((1.0, 1.0, 3.3), 1, 3.5),
    ],
)
def test_rounds_are_as_long_as_learners_that_are_followed_make_them(seconds, quorum, grace):
    rounds = Rounds(every=12, quorum=quorum, grace_seconds=grace)
    found = paces(seconds, rounds)
    took, steps = followed(seconds, rounds, 50)
    assert found.late == ()
    assert found.called_seconds + found.waited_seconds == pytest.approx(took)
    assert found.steps == pytest.approx(steps)


def test_rounds_that_learners_miss_are_about_as_long():
    """Who misses a round comes to the next one in another part of its step: the wait is not the same each time."""
    rounds = Rounds(every=12, quorum=2, grace_seconds=0.5)
    found = paces((1.0, 1.0, 3.5), rounds)
    took, steps = followed((1.0, 1.0, 3.5), rounds, 200)
    assert found.late == (2,)
    assert found.called_seconds + found.waited_seconds == pytest.approx(took, rel=0.05)
    assert found.steps == pytest.approx(steps, rel=0.1)


def uneven(*, slower=3.0, quorum=3, grace=1e3, every=10):
    """Four learners of four devices, of which one has devices that are so much slower."""
    base = selene(nodes=4)
    group = replace(base.groups[0], num_nodes=1, devices_per_node=4)
    device = group.device
    slow = replace(
        device,
        name="slow",
        peak_flops={kind: peak / slower for kind, peak in device.peak_flops.items()},
        memory_bandwidth=device.memory_bandwidth / slower,
    )
    groups = [replace(group, name=name, site=name) for name in "abcd"]
    groups[2] = replace(groups[2], device=slow)
    cluster = replace(base, groups=tuple(groups), wide_area=Link(bandwidth=1e12, latency_seconds=1e-6))
    asked = design(MODEL, cluster, microbatch=8, microbatches=2, replicate=4, shard=4, sharding=Sharding.PARAMETERS)
    axes = sorted(asked.plan.axes, key=lambda axis: axis.name is not AxisName.REPLICATE)
    rounds = Rounds(every=every, learning_rate=0.7, momentum=0.9, quorum=quorum, grace_seconds=grace)
    gradients = GradientSync(kind=SyncKind.DILOCO, rounds=rounds)
    return replace(asked, plan=replace(asked.plan, axes=tuple(axes), gradients=gradients))


def test_a_quorum_of_the_fast_sets_the_pace_and_the_slow_leave_data_out():
    free, held = uneven(), uneven(quorum=0, grace=0.0)
    found, all_ = predict(free), predict(held)
    assert found.step_seconds < 0.75 * all_.step_seconds
    assert found.step_seconds == pytest.approx(sum(line.seconds for line in found.step.lines))
    line = found.step.find(LineName.OUTER)
    assert "learner 2 does" in line.note
    assert found.tokens_per_step < all_.tokens_per_step
    assert found.tokens_per_second > all_.tokens_per_second
    told = meetings(free, found)
    assert any("learner 2 does" in sentence for sentence in told.sentences)
    assert "This plan's ranks meet as diloco every 10 steps, 3 of 4 learners waited for." in told.sentences


def test_ways_of_a_plan_whose_rounds_a_quorum_ends_stand_beside_its_own_step():
    """Those that wait end with the quorum too, so that of unlike learners none is told that waits for the slowest."""
    asked = uneven()
    own, *others = ways_of_meeting(asked)
    assert own.step_seconds == pytest.approx(predict(asked).step_seconds)
    (local,) = [way for way in others if way.kind is SyncKind.LOCAL]
    rounds = Rounds(every=local.every, quorum=3, grace_seconds=1e3)
    waits = replace(asked, plan=replace(asked.plan, gradients=GradientSync(kind=SyncKind.LOCAL, rounds=rounds)))
    assert local.step_seconds == pytest.approx(predict(waits).step_seconds)
    assert predict(uneven(quorum=0, grace=0.0)).step_seconds > 1.3 * own.step_seconds


def test_alike_learners_and_a_quorum_of_all_are_predicted_as_without_one():
    alike, held = uneven(slower=1.0, grace=1.0), uneven(slower=1.0, quorum=0, grace=0.0)
    assert predict(alike).step_seconds == pytest.approx(predict(held).step_seconds)
    assert predict(alike).tokens_per_step == predict(held).tokens_per_step
    everyone, waited = predict(uneven(quorum=4, grace=0.0)), predict(uneven(quorum=0, grace=0.0))
    assert everyone.step_seconds == pytest.approx(waited.step_seconds, rel=1e-6)
    assert everyone.tokens_per_step == waited.tokens_per_step
