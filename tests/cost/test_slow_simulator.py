"""The cost model against a second simulator that shares no code with it: plans must rank alike."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import RECOMPUTES, SHARDINGS, evaluate, predict
from meshwright.spec.plan import ScheduleKind, Sharding
from meshwright.spec.units import format_percent
from tests.cost.cost_examples import design, llama, selene
from tests.cost.legal_plans import CASES, case, sample
from tests.cost.slow_device import BESIDE_WORK, Device
from tests.cost.slow_network import Network
from tests.cost.slow_simulator import slow_seconds
from tests.cost.slow_work import keys_seen
from tests.support.sampled import sampled

PLANS = 120


def ranks(values):
    """The mean place of every value in sorted order, equal ones sharing theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def spearman(first, second):
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def test_rank_correlation():
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 15.0]) == pytest.approx(0.5)
    assert spearman([1.0, 1.0, 2.0], [3.0, 3.0, 9.0]) == pytest.approx(1.0)


@pytest.mark.parametrize("name", sampled(CASES, quick=2))
def test_plans_rank_as_in_the_slow_simulator(name):
    at, table = case(name), sample(name, count=PLANS, seed=1)
    fast = evaluate(table, model=at.model, cluster=at.cluster, job=at.job).step_seconds
    slow = np.array([slow_seconds(at.design(table, row)) for row in range(len(table))])
    apart = np.abs(fast / slow - 1.0)
    told = f"{name}: {spearman(fast, slow):.4f}, median {format_percent(float(np.median(apart)))}"
    assert spearman(fast, slow) >= 0.99, told
    assert np.median(apart) < 0.05, told
    shown = {column: set(getattr(table, column).tolist()) for column in ("sharding", "recompute", "offload")}
    assert len(shown["sharding"]) == len(SHARDINGS)
    assert len(shown["recompute"]) == len(RECOMPUTES)
    assert len(shown["offload"]) == 3
    assert (table.context > 1).any()
    assert (table.chunks > 1).any()


def test_the_predicted_report_ranks_as_the_slow_simulator():
    at, table = case("llama"), sample("llama", count=16, seed=2)
    designs = [at.design(table, row) for row in range(len(table))]
    fast = [predict(entry).step.seconds for entry in designs]
    assert spearman(fast, [slow_seconds(entry) for entry in designs]) >= 0.97


def test_even_stages_have_the_bubble_of_the_papers():
    """(p - 1) / m of the time without one, for gpipe and 1f1b alike (2104.04473), of layers that are all the step."""
    model = llama(width=4096, hidden=16384, heads=32, layers=16, vocab=16)
    cluster = selene(nodes=1)
    quick = replace(cluster.groups[0].inside, latency_seconds=0.0, bandwidth=1e15)
    cluster = replace(cluster, groups=(replace(cluster.groups[0], inside=quick),))
    for kind in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B):
        few, more = (
            slow_seconds(design(model, cluster, pipeline=4, kind=kind, microbatches=count, microbatch=8))
            for count in (8, 16)
        )
        optimizer = 2 * few - more  # (8 + 3) twice, less (16 + 3): three microbatches' time and what is done once
        each = (more - few) / 8
        assert few / each == pytest.approx(11.0, rel=0.05)
        assert optimizer > 3 * each


def test_a_queue_runs_behind_work_and_slows_it():
    device = Device(far=False)
    ticket = device.issue(1.0)
    device.work(10.0)
    assert device.clock == pytest.approx(10.0 + 0.15 * BESIDE_WORK)
    before = device.clock
    device.wait(ticket)
    assert device.clock == before
    late = device.issue(2.0)
    device.pause(device.clock + 0.5)
    device.wait(late)
    assert device.clock == pytest.approx(before + 2.0)


def test_sharding_costs_what_its_collectives_cost_where_links_are_slow():
    model, cluster = llama(width=1024, hidden=4096, heads=16, layers=4), selene(nodes=1)
    crawl = replace(cluster.groups[0].inside, bandwidth=1e8)
    cluster = replace(cluster, groups=(replace(cluster.groups[0], inside=crawl),))
    whole = design(model, cluster, shard=8, sharding=Sharding.PARAMETERS, microbatches=1)
    size = model.parameters * (2 + 2 + 4) * 7 / 8
    assert slow_seconds(whole) == pytest.approx(size / (1e8 * crawl.efficiency), rel=0.15)


def test_keys_are_counted_query_by_query():
    assert keys_seen(4, None) == 10
    assert keys_seen(4, 2) == 7
    assert keys_seen(8, None, 4) == 4 * 4 + 4 * 8


def test_messages_share_the_adapters_of_a_node():
    group = selene(nodes=2).groups[0]
    one = Network(replace(group, nics=1))
    alone, together = one.send_seconds([(0, 8)], 1e9), one.send_seconds([(d, d + 8) for d in range(8)], 1e9)
    assert together == pytest.approx(8 * alone, rel=1e-3)
