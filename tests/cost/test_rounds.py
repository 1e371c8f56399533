"""Learners that meet in rounds: what they wait for, what they send and what they keep."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import PlanTable, evaluate, predict
from meshwright.cost.coding import CODINGS
from meshwright.cost.traffic_rounds import fragment_elements, ranks_across, round_traffic
from meshwright.cost.ways import met_over, ways_of_meeting
from meshwright.spec.cluster import DeviceKind, Link, Precision
from meshwright.spec.plan import AxisName, Sharding, Training
from meshwright.spec.report import LineName, MemoryPart
from meshwright.spec.synchronize import MEETINGS, GradientSync, Rounds, SynchronizeSpec, SyncKind, usual_rounds
from tests.cost.cost_examples import JOB, design, llama, selene

MODEL = llama(width=512, layers=8, hidden=2048, vocab=32000)
LEARNERS = [kind for kind in SyncKind if kind.has_learners]
LAYOUTS = {
    "whole": {"replicate": 16},
    "sharded": {"replicate": 2, "shard": 8, "sharding": Sharding.PARAMETERS},
    "piped": {"replicate": 2, "pipeline": 2, "shard": 4, "sharding": Sharding.OPTIMIZER},
}


def two_sites(bits=1e9):
    base = selene(nodes=2)
    group = replace(base.groups[0], num_nodes=1)
    return replace(
        base,
        groups=(replace(group, name="a", site="a"), replace(group, name="b", site="b")),
        wide_area=Link(bandwidth=bits / 8, latency_seconds=1e-3),
    )


def met(kind, *, layout="sharded", every=8, bits=1e9, precision=Precision.FP32, **fields):
    """Learners of a site each; those of every_step lie so too."""
    asked = design(MODEL, two_sites(bits), microbatch=2, microbatches=2, **LAYOUTS[layout])
    axes = sorted(asked.plan.axes, key=lambda axis: axis.name is not AxisName.REPLICATE)
    asked = replace(asked, plan=replace(asked.plan, axes=tuple(axes)))
    if kind is SyncKind.EVERY_STEP:
        return asked
    rounds = usual_rounds(kind, every=every, learners=asked.plan.replicate, precision=precision)
    gradients = GradientSync(kind=kind, rounds=replace(rounds, **fields))
    return replace(asked, plan=replace(asked.plan, gradients=gradients))


def compressed(compression, *, layout):
    asked = met(SyncKind.EVERY_STEP, layout=layout)
    return replace(asked, plan=replace(asked.plan, gradients=GradientSync(compression=compression)))


def outer(asked):
    return predict(asked).step.find(LineName.OUTER)


@given(
    kind=st.sampled_from(list(SyncKind)),
    every=st.integers(1, 500),
    delay=st.integers(0, 500),
    fragments=st.integers(1, 8),
    momentum=st.sampled_from([0.0, 0.5]),
    precision=st.sampled_from([Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT4]),
)
def test_any_rounds_come_back_from_the_table(kind, precision, **fields):
    plan = replace(
        met(SyncKind.LOCAL).plan, gradients=GradientSync(kind=kind, rounds=Rounds(precision=precision, **fields))
    )
    table = PlanTable.stacked([PlanTable.from_plan(met(SyncKind.EAGER).plan), PlanTable.from_plan(plan)])
    again = table.to_plan(1, model=plan.model, cluster=plan.cluster, sequence_length=plan.sequence_length)
    assert again == plan


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_learners_is_that_of_one_alone_and_what_they_wait_for(layout):
    asked = met(SyncKind.EAGER, layout=layout, bits=1e15, every=100)
    plan = asked.plan.of_learner()
    room = selene(nodes=1) if layout != "whole" else replace(selene(nodes=1), groups=(selene(nodes=2).groups[0],))
    alone = predict(replace(asked, plan=plan, cluster=room))
    whole = predict(asked)
    both = {line.name: line.seconds for line in whole.step.lines if line.name != LineName.OUTER}
    assert both == pytest.approx({name: alone.step.find(name).seconds for name in both}, rel=1e-9)
    assert whole.step_seconds == pytest.approx(alone.step_seconds + whole.step.find(LineName.OUTER).seconds)
    assert whole.balanced


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8])
@pytest.mark.parametrize("kind", LEARNERS)
def test_faster_links_never_make_a_step_longer_and_what_is_exposed_is_of_the_whole(kind, precision):
    found = [
        evaluate(PlanTable.from_plan(asked.plan), model=MODEL, cluster=asked.cluster, job=JOB)
        for asked in (met(kind, bits=bits, precision=precision) for bits in (1e7, 1e9, 3e9, 1e11))
    ]
    seconds = [float(costs.parts[LineName.OUTER][0]) for costs in found]
    assert all(slow >= fast - 1e-12 for slow, fast in pairwise(seconds))
    for costs, exposed in zip(found, seconds, strict=True):
        assert 0.0 < exposed <= float(costs.total[LineName.OUTER][0]) + 1e-12
    if kind in (SyncKind.LOCAL, SyncKind.DILOCO):
        assert seconds[0] == pytest.approx(float(found[0].total[LineName.OUTER][0]))


@pytest.mark.parametrize(
    ("kind", "precision", "layout"),
    [
        (SyncKind.EAGER, Precision.FP32, "piped"),
        (SyncKind.EAGER, Precision.INT8, "whole"),
        (SyncKind.CO2, Precision.BF16, "sharded"),
        (SyncKind.STREAMING, Precision.FP32, "sharded"),
        (SyncKind.STREAMING, Precision.INT8, "piped"),
        (SyncKind.EAGER, Precision.INT4, "sharded"),
    ],
)
def test_the_fewest_steps_that_hide_a_round_hide_it_and_fewer_do_not(kind, precision, layout):
    asked = met(kind, layout=layout, bits=1e9)
    job = replace(JOB, synchronize=SynchronizeSpec(kinds=(kind,), most_every=4000, precision=precision))
    way = next(way for way in ways_of_meeting(replace(asked, job=job)) if way.kind is kind and not way.is_plan)
    found = outer(met(kind, layout=layout, every=way.every, precision=precision))
    nothing = outer(met(kind, layout=layout, every=way.every, precision=precision, bits=1e15))
    assert way.every > 4
    assert found.seconds == pytest.approx(nothing.seconds, abs=2e-2 * predict(asked).step_seconds)
    hasty = outer(met(kind, layout=layout, every=way.every // 2, precision=precision))
    assert hasty.seconds > 2.0 * found.seconds


@pytest.mark.parametrize(("microbatches", "share", "hidden"), [(1, 0.4, True), (1, 0.9, False), (8, 0.9, True)])
def test_sums_of_what_is_rounded_set_out_after_the_first_forward_pass_that_ends_later(microbatches, share, hidden):
    """Both collectives of a fragment take `share` of the step that hides it, a half each."""

    def shown(bits):
        asked = met(SyncKind.EAGER, every=4, precision=Precision.INT8, bits=bits)
        schedule = replace(asked.plan.schedule, microbatches=microbatches)
        plan = replace(asked.plan, microbatch=128 // microbatches, schedule=schedule)
        costs = evaluate(PlanTable.from_plan(plan), model=MODEL, cluster=asked.cluster, job=JOB)
        return *(float(each[LineName.OUTER][0]) for each in (costs.parts, costs.total)), float(costs.step_seconds[0])

    least, _, step = shown(1e15)
    _, slow, _ = shown(1e9)
    exposed, whole, _ = shown(1e9 * (slow - least) / (share * step))
    assert whole - least == pytest.approx(share * step, rel=0.1)
    assert exposed - least == pytest.approx(0.0 if hidden else 0.5 * share * step, rel=0.1, abs=1e-2 * step)


def slowed(asked, slower):
    """On devices whose memory is so much slower."""
    device = asked.cluster.groups[0].device
    device = replace(device, memory_bandwidth=device.memory_bandwidth / slower)
    cluster = replace(asked.cluster, groups=tuple(replace(each, device=device) for each in asked.cluster.groups))
    return replace(asked, cluster=cluster)


def way_of(kind, *, precision, every=0, slower=1.0):
    """Learners of two sites at 1 Gbit/s, on devices whose memory is so much slower; the fewest steps by default."""
    asked_for = SynchronizeSpec(kinds=(kind,), every=every, most_every=10**6, precision=precision)
    entry = replace(slowed(met(kind, precision=precision), slower), job=replace(JOB, synchronize=asked_for))
    return way_named(kind, entry)


def waited_share(way, *, precision, slower):
    """Of all time, what learners wait for."""
    asked = slowed(met(way.kind, precision=precision, every=way.every), slower)
    found = predict(asked)
    return found.step.find(LineName.OUTER).seconds / found.step_seconds


@pytest.mark.parametrize("kind", [SyncKind.EAGER, SyncKind.STREAMING, SyncKind.DILOCO])
def test_fewer_bits_make_rounds_shorter_until_outer_steps_are_a_twentieth_of_them(kind):
    order = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT4)
    found = [way_of(kind, precision=precision).every for precision in order]
    assert all(wide > narrow for wide, narrow in pairwise(found))
    slow = way_of(kind, precision=Precision.INT4, slower=3e3)
    hasty = way_of(kind, precision=Precision.INT4, slower=3e3, every=slow.every // 2)
    assert waited_share(slow, precision=Precision.INT4, slower=3e3) <= 0.05
    hurried = waited_share(hasty, precision=Precision.INT4, slower=3e3)
    assert hurried > 0.05 or slow.every == kind.least_every


@pytest.mark.parametrize("kind", LEARNERS)
def test_rounds_are_no_shorter_than_is_sound_but_where_the_job_says_so(kind):
    fast = met(kind, bits=1e15)
    told = (SynchronizeSpec(), SynchronizeSpec(every=1), SynchronizeSpec(most_every=1))
    found = [way_named(kind, replace(fast, job=replace(JOB, synchronize=spec))).every for spec in told]
    assert found[0] == kind.least_every or (kind.waits and found[0] > kind.least_every)
    assert found[1:] == [1, 1]


def way_named(kind, asked):
    return next(way for way in ways_of_meeting(asked) if way.kind is kind and not way.is_plan)


def test_rounding_of_gradients_is_priced():
    asked = met(SyncKind.EVERY_STEP, layout="whole")
    plain, eight = (
        replace(asked, plan=replace(asked.plan, gradients=GradientSync(precision=precision)))
        for precision in (Precision.BF16, Precision.INT8)
    )
    device = eight.cluster.groups[0].device
    least = CODINGS[Precision.INT8].bytes * MODEL.parameters / (device.memory_bandwidth * device.memory_fraction)
    whole = [predict(each).step.find(LineName.GRADIENTS).seconds for each in (plain, eight)]
    assert least <= whole[1] < whole[0] + least


def test_those_that_wait_meet_as_often_as_a_twentieth_of_the_step_allows():
    asked = replace(met(SyncKind.LOCAL), job=replace(JOB, synchronize=SynchronizeSpec(most_every=100_000)))
    ways = {way.kind: way for way in ways_of_meeting(asked)[1:]}
    for kind in (SyncKind.LOCAL, SyncKind.DILOCO):
        exact = met(kind, every=ways[kind].every)
        assert 0.04 < outer(exact).seconds / predict(exact).step_seconds < 0.06
    capped = replace(asked, job=replace(JOB, synchronize=SynchronizeSpec(most_every=16)))
    assert {way.every for way in ways_of_meeting(capped)[1:]} == {0, 16}
    told = replace(asked, job=replace(JOB, synchronize=SynchronizeSpec(every=5)))
    assert {way.every for way in ways_of_meeting(told)[1:]} == {0, 5}


@pytest.mark.parametrize("kind", LEARNERS)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8, Precision.INT4])
def test_what_a_device_sends_is_what_the_collectives_of_a_round_do(kind, precision):
    asked = met(kind, every=24, precision=precision)
    learners, every = asked.plan.learners, 24
    turns = {"all_reduce": 2.0, "all_to_all": 1.0, "all_gather": 1.0}
    sent = sum(
        turns[each.operation] * each.calls * each.bytes * (learners - 1) / learners
        for each in round_traffic(asked, rank=3)
    )
    assert outer(asked).bytes * every == pytest.approx(sent, rel=1e-3)
    (found,) = [each for each in met_over(asked, outer_bytes=outer(asked).bytes) if each.line is LineName.OUTER]
    assert (found.tier, found.bytes) == ("between sites", outer(asked).bytes)


def test_every_trained_element_of_a_rank_travels_once_a_round():
    asked = met(SyncKind.STREAMING, layout="piped", every=8)
    plan = asked.plan
    own = [sum(fragment_elements(asked, rank=rank)) for rank in range(plan.world_size)]
    inside = plan.of_learner()
    assert sum(own) == plan.learners * MODEL.parameters
    assert inside.world_size * plan.learners == plan.world_size
    for rank in range(plan.world_size):
        peers = ranks_across(plan, rank)
        assert rank in peers
        assert len({own[peer] for peer in peers}) == 1
    frozen = replace(plan.stages[0], groups=tuple(replace(g, training=Training.FROZEN) for g in plan.stages[0].groups))
    less = replace(asked, plan=replace(plan, stages=(frozen, *plan.stages[1:])))
    assert sum(fragment_elements(less, rank=0)) == 0
    assert round_traffic(met(SyncKind.EVERY_STEP), rank=0) == ()


def test_what_learners_keep_is_in_memory():
    owned = MODEL.parameters / 8 * 4.0
    plain = predict(met(SyncKind.EVERY_STEP)).memory[0].parts
    copies = {SyncKind.LOCAL: 1, SyncKind.DILOCO: 2, SyncKind.CO2: 3}
    for kind, count in copies.items():
        parts = predict(met(kind)).memory[0].parts
        assert parts[MemoryPart.BUFFERS] - plain[MemoryPart.BUFFERS] == pytest.approx(count * owned)
    for kind in (SyncKind.EAGER, SyncKind.STREAMING):
        in_parts = predict(met(kind)).memory[0].parts
        largest = max(fragment_elements(met(kind), rank=0)) * 4.0
        assert largest < owned
        kept = in_parts[MemoryPart.BUFFERS] - plain[MemoryPart.BUFFERS]
        assert kept == pytest.approx(2 * owned + largest)
    whole = partial(met, SyncKind.EAGER, every=8, delay=8, fragments=1)
    late, wide = (predict(whole(precision=kind)).memory[0] for kind in (Precision.BF16, Precision.FP32))
    assert wide.total - late.total == pytest.approx(owned / 2)
    eight = predict(whole(precision=Precision.INT8)).memory[0].parts
    assert eight[MemoryPart.BUFFERS] - plain[MemoryPart.BUFFERS] == pytest.approx(4.0 * owned)


@pytest.mark.parametrize("layout", ["sharded", "whole"])
def test_ways_of_meeting_are_priced_as_plans_that_meet_so(layout):
    for way in ways_of_meeting(met(SyncKind.EVERY_STEP, layout=layout))[1:]:
        rounds = met(way.kind, layout=layout, every=way.every)
        made = rounds if way.compression is None else compressed(way.compression, layout=layout)
        assert way.step_seconds == pytest.approx(predict(made).step_seconds, rel=1e-12)
        assert way.peak_bytes == pytest.approx(predict(made).peak_bytes, rel=1e-12)


def test_ranks_that_only_shard_are_taken_as_learners_and_as_replicas():
    shared = design(MODEL, two_sites(), shard=16, sharding=Sharding.PARAMETERS)
    assert {way.learners for way in ways_of_meeting(shared)[1:] if way.every} <= {2, 4, 8, 16}
    assert {way.word for way in ways_of_meeting(shared)[1:]} == set(MEETINGS) - {"every_step"}
    assert ways_of_meeting(design(MODEL, two_sites(), pipeline=2, tensor=2)) == ()


def test_on_processors_the_network_hides_and_the_cores_do_not():
    asked = design(MODEL, two_sites(), replicate=2, shard=4, sharding=Sharding.PARAMETERS)
    table = PlanTable.from_plan(replace(asked.plan, gradients=met(SyncKind.EAGER, every=50).plan.gradients))
    device = replace(two_sites().groups[0].device, kind=DeviceKind.CPU)
    far, near = (
        replace(base, groups=tuple(replace(g, device=device, devices_per_node=each) for g in base.groups))
        for base, each in ((two_sites(), 4), (selene(nodes=1), 8))
    )
    apart, together = (evaluate(table, model=MODEL, cluster=each, job=JOB) for each in (far, near))
    hidden = [float(each.total[LineName.OUTER][0] - each.parts[LineName.OUTER][0]) for each in (apart, together)]
    assert hidden[0] > 0.0
    assert hidden[1] == pytest.approx(0.0, abs=1e-12)
