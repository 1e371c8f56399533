"""The host's memory: what its link and the devices beside one leave of it."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright import catalog
from meshwright.cost import PlanTable, evaluate
from meshwright.cost.links import lay_links
from meshwright.cost.offload import away_seconds, beside, carried, host_rate, host_room
from meshwright.cost.optimizers import host_bytes
from meshwright.cost.overlap import Traffic
from meshwright.cost.stacks import software
from meshwright.cost.states import state_bytes
from meshwright.cost.table import OFFLOADS, SHARDINGS
from meshwright.spec.cluster import Link
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.optimizer import Master, Moments, OptimizerSpec
from meshwright.spec.plan import Offload, Sharding
from meshwright.spec.report import LineName, MemoryPart
from tests.cost.cost_examples import even_layout, llama, selene

LINK = Link(bandwidth=30e9, latency_seconds=1e-5, efficiency=0.8)


def group(**changes):
    return replace(selene(nodes=1).groups[0], **{"host": LINK, "host_bandwidth": None, **changes})


def rate(entry, devices=8):
    return float(host_rate(np.array([float(devices)]), group=entry)[0])


def test_devices_that_copy_at_once_share_the_switch_and_the_memory_behind_it():
    assert rate(group()) == pytest.approx(24e9)
    assert rate(group(host=replace(LINK, oversubscription=2.0))) == pytest.approx(12e9)
    assert rate(group(host_bandwidth=80e9)) == pytest.approx(10e9)
    assert rate(group(host_bandwidth=800e9)) == pytest.approx(24e9)


def test_a_device_alone_on_its_node_has_the_whole_host():
    """One of eight devices steps as fast as eight that divide the same parameters, and has the room of all."""
    alone = group(host=replace(LINK, oversubscription=2.0), host_bandwidth=240e9, host_bytes=8e9)
    assert [rate(alone, devices) for devices in (1, 2, 8)] == pytest.approx([24e9, 12e9, 12e9])
    columns = {"shard": [1, 2, 8, 16], "offload": OFFLOADS.index(Offload.OPTIMIZER)}
    table = PlanTable.build(columns, layouts=[even_layout(layers=4, pipeline=1)])
    assert beside(table, alone).tolist() == [1.0, 2.0, 8.0, 8.0]
    assert host_room(table, alone)[:, 0].tolist() == [8e9, 4e9, 1e9, 1e9]
    assert np.isinf(host_room(table, replace(alone, host_bytes=None))).all()
    owned = np.full((4, 1), 1e9) / np.array([[1.0], [2.0], [8.0], [8.0]])
    passed = [away_seconds(owned, table, sizes=state_bytes(table), group=alone, passed=each) for each in (0.0, 28.0)]
    assert (passed[1] - passed[0])[:, 0] == pytest.approx([28e9 / (0.43 * 240e9)] * 4)
    assert passed[0][:, 0] == pytest.approx(6e9 / np.array([24e9, 2 * 12e9, 8 * 12e9, 8 * 12e9]))


def test_what_one_kernel_steps_in_bf16_takes_a_host_no_longer_than_in_full_precision():
    narrow = OptimizerSpec(state=Moments.BF16, master=Master.BF16_STOCHASTIC)
    assert host_bytes(narrow, software("torch-narrow-step")) == host_bytes(OptimizerSpec(), software("torch"))
    assert host_bytes(narrow, software("torch")) > 10 * host_bytes(OptimizerSpec(), software("torch"))


def test_copies_take_latency_and_bytes_where_they_are_made():
    pair = group(host=replace(LINK, oversubscription=2.0))
    table = PlanTable.build({"shard": [8, 8]}, layouts=[even_layout(layers=4, pipeline=1)])
    found = carried(np.array([24e9, 0.0]), table, group=pair)
    assert found.seconds == pytest.approx([2.00001, 0.0])
    assert found.lanes == pytest.approx([1.0, 0.0])
    assert 0.0 < found.memory[0] < 0.1
    assert found.memory[1] == 0.0
    assert not carried(np.zeros(2), table, group=group(host=None)).seconds.any()
    with pytest.raises(ConfigError):
        carried(np.ones(2), table, group=group(host=None))


@pytest.mark.parametrize("name", ["2x8xA100-80GB", "4x8xH100"])
def test_a_node_never_copies_more_than_its_memory_streams(name):
    (entry,) = catalog.load_cluster(name).groups
    assert 0.0 < rate(entry) * entry.devices_per_node <= entry.host_bandwidth


def test_two_devices_of_a_pair_copy_no_more_than_one_link_carries():
    (entry,) = catalog.load_cluster("2x8xA100-80GB").groups
    assert 2.0 * rate(entry) == pytest.approx(entry.host.bandwidth * entry.host.efficiency)


def test_parameters_there_leave_nothing_but_what_a_layer_gathers_and_cross_in_every_microbatch():
    model, pair = llama(width=512, hidden=1408, layers=3, vocab=2048, heads=8), group(host_bytes=1e12)
    cluster = replace(selene(nodes=1), groups=(pair,))
    kinds = [Offload.NONE, Offload.OPTIMIZER, Offload.PARAMETERS, Offload.PARAMETERS]
    columns = {
        "shard": 8,
        "sharding": SHARDINGS.index(Sharding.PARAMETERS),
        "offload": [OFFLOADS.index(kind) for kind in kinds],
        "microbatches": [2, 2, 2, 4],
    }
    table = PlanTable.build(columns, layouts=[even_layout(layers=3, pipeline=1)])
    job = JobSpec(sequence_length=512, data=DataSpec(document_mask=False))
    found = evaluate(table, model=model, cluster=cluster, job=job)
    for part in (MemoryPart.PARAMETERS, MemoryPart.GRADIENTS, MemoryPart.OPTIMIZER):
        held = found.memory[part][:, 0]
        assert held[0] > 0.0
        assert held[2] == held[3] == 0.0
    assert found.memory[MemoryPart.ACTIVATIONS][2, 0] == found.memory[MemoryPart.ACTIVATIONS][0, 0]
    step = found.parts[LineName.OPTIMIZER]
    owned = model.parameters / 8
    assert step[3] - step[2] == pytest.approx(2 * 3 * 4.0 * owned / rate(pair))
    assert step[0] < step[1] < step[2]
    full = replace(cluster, groups=(replace(pair, host_bytes=8 * 15.0 * owned),))
    crowded = evaluate(table, model=model, cluster=full, job=job)
    assert crowded.memory_bytes.tolist() == found.memory_bytes.tolist(), "what has no room is not on the device"
    over = np.maximum(crowded.host - crowded.host_room, 0.0).max(axis=1)
    assert crowded.fits.tolist() == [True, False, False, False]
    # Of each parameter there a master, a gradient and two moments: a byte of sixteen has no room. Gradients of the
    # embedding are gone when all others come to an optimizer; beside parameters those of one block are added up.
    table_, largest = 4.0 * model.embedding.parameters / 8, 4.0 * max(block.parameters for block in model.blocks) / 8
    assert over == pytest.approx([0.0, owned - table_, owned + largest, owned + largest])
    assert found.host[:, 0] == pytest.approx([0.0, *(15.0 * owned + over[1:])])


def test_an_optimizer_on_the_host_is_as_quick_as_it_was_measured():
    """10 billion parameters in 2.57 s on two Xeon of twelve channels of DDR4-2666 in all (2101.06840, table 4)."""
    host = group(host_bandwidth=12 * 8 * 2666e6)
    step, moved = OptimizerSpec(), 4.0 + 2.0
    table = PlanTable.build(
        {"shard": 8, "offload": OFFLOADS.index(Offload.OPTIMIZER)}, layouts=[even_layout(layers=4, pipeline=1)]
    )
    owned = np.full((1, 1), 10e9 / 8)
    seconds = [
        away_seconds(owned, table, sizes=state_bytes(table), group=host, passed=host_bytes(step, software(name)))[0, 0]
        - moved * owned[0, 0] / rate(host)
        for name in ("torch", "deepspeed")
    ]
    assert seconds[0] == pytest.approx(2.57, rel=0.02)
    assert seconds[1] / seconds[0] == pytest.approx((28 + 18) / 28)


def test_what_leaves_a_node_takes_the_lanes_of_its_devices():
    """Of 16 ranks on two nodes each of eight devices sends an eighth of what one ring passes on."""
    entry = group()
    cluster = replace(selene(nodes=2), groups=(replace(entry, num_nodes=2),))
    columns = {"shard": [16, 2, 1], "context": [1, 1, 16], "replicate": [1, 8, 1]}
    table = PlanTable.build(columns, layouts=[even_layout(layers=4, pipeline=1)])
    links = lay_links(table, group=cluster.groups[0], cluster=cluster, software=software("torch"))
    assert links.data.sharded.lanes == pytest.approx(np.array([15 / 16 / 8, 0.0, 15 / 16 / 8]) / 24e9)
    assert links.data.replicas.lanes == pytest.approx(np.array([0.0, 2 * 7 / 8 / 4, 0.0]) / 24e9)
    assert links.layer.context.runs.far.tolist() == [False, False, True]
    alone = lay_links(table, group=replace(entry, host=None), cluster=cluster, software=software("torch"))
    assert not alone.data.sharded.lanes.any()


def test_where_nothing_but_their_lanes_joins_devices_what_stays_in_a_node_takes_them_too():
    entry = group()
    lanes = replace(entry, inside=replace(entry.inside, bandwidth=entry.host.bandwidth, peers=None))
    cluster = replace(selene(nodes=1), groups=(lanes,))
    table = PlanTable.build({"shard": [8, 2, 1]}, layouts=[even_layout(layers=4, pipeline=1)])
    links, apart = (
        lay_links(table, group=each, cluster=replace(cluster, groups=(each,)), software=software("torch"))
        for each in (lanes, entry)
    )
    assert links.data.sharded.lanes == pytest.approx(np.array([7 / 8, 1 / 2, 0.0]) / 24e9)
    assert not apart.data.sharded.lanes.any()
    traffic = Traffic.over(np.full(3, 0.01), links.data.sharded, num_bytes=np.full(3, 100e6))
    assert traffic.near.tolist() == [0.01] * 3
    assert traffic.lanes == pytest.approx(np.array([7 / 8, 1 / 2, 0.0]) * 100e6 / 24e9)
