"""Machines of published runs: devices by every spelling, several kinds in one cluster, networks as they are written."""

from __future__ import annotations

import pytest

from meshwright.cost.uncertainty import by_analogy
from meshwright.replay.express import express
from meshwright.replay.machines import machines_of
from meshwright.replay.names import known_device, named_devices
from meshwright.replay.networks import islands
from meshwright.replay.published import replay
from meshwright.replay.rates import generation_gigabits, node_gigabits, unread_numbers
from meshwright.spec.plan import AxisName
from tests.replay.test_validate import row


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A100-PCIe-40", "A100-40GB-PCIe"),
        ("A100 PCIe 80GB", "A100-80GB-PCIe"),
        ("A100 80GB SXM4", "A100-80GB"),
        ("A800-SXM4-80GB", "A800-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("V100-PCIE-32GB", "V100-32GB-PCIe"),
        ("H100-PCIe-80GB", "H100-PCIe"),
        ("H100 NVL", "H100-NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H200-141GB", "H200"),
        ("HGX B200", "B200"),
        ("DGX-B300", "B300"),
        ("GB200-NVL72", "GB200"),
        ("DGX GB300", "GB300"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("MI300A-128GB", "MI300A"),
        ("MI250X (GCD)", "MI250X-GCD"),
        ("MI350X-288GB", "MI350X"),
        ("Cloud TPU v4", "TPU-v4"),
        ("TPU-v4-128", "TPU-v4"),
        ("TPU v5 lite", "TPU-v5e"),
        ("TPU Trillium (v6e)", "TPU-v6e"),
        ("TPU-v3 core", "TPU-v3-core"),
        ("TITAN RTX 24GB", "Titan-RTX"),
        ("GeForce RTX 3090", "RTX-3090"),
    ],
)
def test_a_device_is_known_whatever_is_written_around_it(name: str, known: str) -> None:
    found = known_device(name)
    assert found is not None
    assert found.name == known


def test_printed_memory_chooses_the_device_of_that_memory() -> None:
    found = express(row(gpu="A100", gpu_mem_gb="40")).design.cluster.groups[0].device
    assert (found.name, found.memory_bandwidth) == ("A100-40GB", 1555e9)


def test_a_memory_with_which_no_such_device_is_sold_is_another_device_by_analogy() -> None:
    """Leonardo's A100 of 64 GB and MareNostrum's H100 of 64 GB have rates of their own, which no sheet tells."""
    told = express(row(gpu="H100-64GB-SXM", gpu_mem_gb="64"))
    device = told.design.cluster.groups[0].device
    assert (device.name, device.memory_bytes / 2**30) == ("H100", pytest.approx(64.0))
    assert by_analogy(device)
    assert "the rates of H100, which has other memory than 64 GB" in told.assumed
    known = express(row(gpu="H100-80GB-SXM", gpu_mem_gb="80"))
    assert not by_analogy(known.design.cluster.groups[0].device)
    assert not [word for word in known.assumed if "other memory" in word]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("4xV100-16GB + 12xT4", [("V100-16GB", 4), ("T4", 12)]),
        ("V100-16GB (4), T4 (12)", [("V100-16GB", 4), ("T4", 12)]),
        ("1x4xV100-16GB & 3x4xT4", [("V100-16GB", 4), ("T4", 12)]),
        ("mixed: 4 V100 and 12 T4", [("V100", 4), ("T4", 12)]),
        ("V100x4/T4:12", [("V100", 4), ("T4", 12)]),
        ("V100-32GB/T4", [("V100-32GB", None), ("T4", None)]),
        ("A100-80GB (SXM, NVSwitch)", [("A100-80GB (SXM, NVSwitch)", None)]),
        ("A100-80GB, NVSwitch", [("A100-80GB, NVSwitch", None)]),
        ("16xA100", [("A100", 16)]),
    ],
)
def test_several_kinds_are_told_apart(text: str, kinds: list[tuple[str, int | None]]) -> None:
    assert [(entry.name, entry.count) for entry in named_devices(text)] == kinds


def test_a_mixed_cluster_is_laid_out_as_it_is_named_and_as_slow_as_its_slowest() -> None:
    plain = {"precision": "fp16", "tp": "1", "pp": "4", "dp": "4", "zero": "0", "sp": "no", "recompute": "full"}
    mixed = row(**plain, gpu="4xV100-32GB + 12xT4", gpus_per_node="4")
    found = express(mixed)
    groups = found.design.cluster.groups
    assert [(group.device.name, group.num_nodes, group.devices_per_node) for group in groups] == [
        ("V100-32GB", 1, 4),
        ("T4", 3, 4),
    ]
    assert any("order in which they are named" in told for told in found.assumed)
    fast, slow = (replay(row(**plain, gpu=gpu, gpus_per_node="4")) for gpu in ("V100-32GB", "T4"))
    both = replay(mixed)
    assert fast.point is not None
    assert slow.point is not None
    assert both.point is not None
    assert fast.point.predicted_seconds < both.point.predicted_seconds <= 1.001 * slow.point.predicted_seconds


def test_columns_may_say_a_number_for_each_kind() -> None:
    each = row(gpu="A100+V100", n_gpus="8+8", gpus_per_node="8+4", gpu_mem_gb="40+16", inter_gbit_per_node="800/100")
    groups = express(each).design.cluster.groups
    assert [(group.device.name, group.num_nodes) for group in groups] == [("A100-40GB", 1), ("V100-16GB", 2)]
    assert [round(group.nic.bandwidth * group.nics * 8e-9) for group in groups] == [800, 100]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "4xV100+8xT4"}, "are not 16 devices"),
        ({"gpu": "4xV100+T4"}, "is not printed"),
        ({"gpu": "V100+Abacus"}, "no figures of the device Abacus"),
    ],
)
def test_a_mixed_cluster_that_does_not_add_up_has_its_reason(changes: dict[str, str], reason: str) -> None:
    assert reason in replay(row(**changes)).reason


def test_what_joins_machines_may_be_told_at_length() -> None:
    """Without a search that begins again at every blank."""
    assert islands(" " * 300_000 + "between").between == ""
    assert islands("a " * 300_000).each == (("a " * 300_000).strip(),)
    assert islands("IB" + " ;" * 300_000 + "Ethernet between sites").between == "Ethernet"


def test_islands_are_sites_with_what_is_between_them() -> None:
    text = "IB 200Gb/s + RoCE 100Gb/s, Ethernet 25Gb/s between"
    assert islands(text).each == ("IB 200Gb/s", "RoCE 100Gb/s")
    cluster = express(row(inter_link=text, gpu="A100-80GB", n_gpus="32", dp="8")).design.cluster
    assert [group.num_nodes for group in cluster.groups] == [2, 2]
    assert len(cluster.sites) == 2
    assert cluster.wide_area is not None
    assert cluster.wide_area.bandwidth == pytest.approx(2 * 25e9 / 8)
    joined = express(row(inter_link="IB 200Gb/s + RoCE 100Gb/s", n_gpus="32", dp="8")).design.cluster
    assert (len(joined.groups), len(joined.sites), joined.wide_area) == (2, 1, None)


@pytest.mark.parametrize(
    ("link", "gigabits"),
    [
        ("Slingshot-11 4x200", 800.0),
        ("EFA 400", 400.0),
        ("AWS EFA 4x100 Gbps", 400.0),
        ("25GbE", 25.0),
        ("10 Gbit/s", 10.0),
        ("400G RoCEv2 x8", 3200.0),
        ("1.6 Tb/s", 1600.0),
        ("10 Gigabit Ethernet", 10.0),
        ("10-Gigabit Ethernet", 10.0),
        ("Gigabit Ethernet", 1.0),
        ("10GBASE-T", 10.0),
        ("2.5G Ethernet", 2.5),
        ("100 Mb/s Ethernet", 0.1),
        ("8 NICs of 400 Gb/s", 3200.0),
        ("eight 400 Gb/s InfiniBand", 3200.0),
        ("8xConnectX-7 400G", 3200.0),
        ("8x NDR 400Gb/s", 3200.0),
        ("8 rails 400Gb/s", 3200.0),
        ("dual-rail HDR 200Gb/s", 400.0),
        ("IB 8*200Gbps", 1600.0),
        ("400 Gb/s per NIC", 1600.0),
        ("400Gb/s each", 1600.0),
        ("400Gb/s per port", 1600.0),
        ("400 Gb/s per NIC, 2 NICs per node", 800.0),
        ("4 x 25 GB/s Slingshot", 800.0),
        ("50 GB/s per GPU", 3200.0),
        ("400Gb/s/GPU", 3200.0),
        ("2x200Gb/s per GPU", 3200.0),
        ("8 x 400Gb/s, one per GPU", 3200.0),
        ("Slingshot 11 200Gb/s", 200.0),
        ("3.2 Tb/s (8 NICs)", 3200.0),
        ("400 Gb/s per node", 400.0),
        ("InfiniBand", None),
        ("InfiniBand HDR, Gigabit Ethernet", None),
        ("", None),
    ],
)
def test_rates_are_read_in_every_spelling(link: str, gigabits: float | None) -> None:
    """Of a node of eight devices and four adapters."""
    assert node_gigabits(link, devices=8, adapters=4) == gigabits


def test_a_generation_without_a_rate_is_that_of_every_adapter() -> None:
    nics = {
        name: express(row(inter_link=name)).design.cluster.groups[0].nic.bandwidth * 8e-9
        for name in ("InfiniBand EDR", "InfiniBand HDR", "IB HDR100", "IB NDR200")
    }
    assert nics == {"InfiniBand EDR": 100.0, "InfiniBand HDR": 200.0, "IB HDR100": 100.0, "IB NDR200": 200.0}


@pytest.mark.parametrize(
    ("link", "gigabits"), [("dual-rail HDR", 400.0), ("NDR, 8 NICs", 3200.0), ("8x NDR", 3200.0), ("IB NDR", 1600.0)]
)
def test_a_generation_is_of_as_many_adapters_as_are_said(link: str, gigabits: float) -> None:
    assert generation_gigabits(link, adapters=4) == gigabits


def test_a_rate_told_at_length_is_read_in_a_time_that_its_length_tells() -> None:
    for text in ("8 " + "NIC " * 30_000, "1" * 100_000, "IB " + "1," * 50_000, "a" * 100_000, "400G" + " ," * 50_000):
        node_gigabits(text, devices=8, adapters=8)
        unread_numbers(text)


def test_sockets_are_slower_than_remote_memory_access_and_pci_express_than_nvlink() -> None:
    fast, sockets, pcie = (
        express(row(**changes)).design.cluster.groups[0]
        for changes in ({}, {"inter_link": "100GbE TCP"}, {"intra_link": "PCIe Gen4 x16"})
    )
    assert sockets.nic.latency_seconds > fast.nic.latency_seconds
    assert pcie.inside.bandwidth == 31.5e9 < fast.inside.bandwidth


def test_boards_of_two_dies_are_two_devices() -> None:
    plan = {"tp": "2", "pp": "1", "zero": "0", "sp": "no", "precision": "bf16", "framework": "Megatron-Core"}
    boards = express(row(**plan, gpu="MI250X-128GB", n_gpus="8", gpus_per_node="4", dp=""))
    assert boards.design.plan.world_size == 16
    assert boards.design.cluster.groups[0].devices_per_node == 8
    assert "8 boards of MI250X-128GB, of two devices each" in boards.assumed
    dies = express(row(**plan, gpu="MI250X", n_gpus="8", gpus_per_node="4", dp="4"))
    assert dies.design.plan.world_size == 8


@pytest.mark.parametrize("name", ["MI250X-GCD", "MI250X (GCD)", "MI250X die", "AMD Instinct MI250X 128GB, GCDs"])
def test_dies_that_are_called_so_are_counted_as_written(name: str) -> None:
    plan = {"tp": "2", "pp": "1", "zero": "0", "sp": "no", "precision": "bf16", "framework": "Megatron-Core"}
    found = express(row(**plan, gpu=name, n_gpus="64", gpus_per_node="4", dp=""))
    assert found.design.plan.world_size == 64
    assert found.design.cluster.groups[0].devices_per_node == 4
    assert not any("boards" in told for told in found.assumed)


def test_a_rack_has_as_many_devices_whatever_a_node_is_called() -> None:
    groups = [
        express(row(gpu="GB200", n_gpus="144", gpus_per_node=size, dp="36", gbs="72", precision="bf16"))
        for size in ("4", "72")
    ]
    small, large = (entry.design.cluster.groups[0] for entry in groups)
    assert (small.rack_nodes, large.rack_nodes, large.num_nodes) == (18, 1, 2)


def test_nodes_of_a_rack_are_given_out_by_powers_of_two() -> None:
    blackwell = {"gpu": "GB200-NVL72", "gpus_per_node": "4", "precision": "bf16", "tp": "4", "pp": "1", "dp": ""}
    racks = {
        count: express(row(**blackwell, n_gpus=count, gbs="576")).design.cluster.groups[0].rack_nodes
        for count in ("64", "144", "128")
    }
    assert racks == {"64": 18, "144": 18, "128": 16}


@pytest.mark.parametrize("changes", [{"tp": "1", "pp": "1", "cp": "8", "zero": "0"}, {"tp": "4", "pp": "8"}])
def test_what_stays_in_a_rack_does_not_meet_the_network(changes: dict[str, str]) -> None:
    """A ring over context ranks and a pipeline, each over several nodes of one NVL72."""
    rack = {"gpu": "GB200", "n_gpus": "64", "gpus_per_node": "4", "precision": "bf16", "dp": "", **changes}
    fast, slow = (replay(row(**rack, inter_gbit_per_node=rate)).point for rate in ("1600", "10"))
    assert fast is not None
    assert slow is not None
    assert fast.predicted_seconds == pytest.approx(slow.predicted_seconds, rel=1e-9)
    beyond = {**rack, "n_gpus": "128"}
    fast, slow = (replay(row(**beyond, inter_gbit_per_node=rate)).point for rate in ("1600", "10"))
    assert fast is not None
    assert slow is not None
    assert fast.predicted_seconds < slow.predicted_seconds


def test_what_the_host_drives_is_slower_than_its_line() -> None:
    """84.7 of 400 Gb/s over four Omni-Path links (bigscience-workshop/bigscience, experiments/bandwidth)."""
    slow = express(row(inter_link="Omni-Path (4 links/node)", inter_gbit_per_node="400")).design.cluster.groups[0]
    plain = express(row(inter_link="InfiniBand", inter_gbit_per_node="400")).design.cluster.groups[0]
    assert slow.nic.bandwidth == plain.nic.bandwidth
    assert slow.nic.bandwidth * slow.nic.efficiency * slow.nics == pytest.approx(84.7e9 / 8, rel=0.01)


def test_lanes_that_a_source_measured_are_as_fast_as_it_says() -> None:
    said = express(row(gpu="T4", intra_link="PCIe (modelled as 50 Gb/s)")).design.cluster.groups[0].inside
    lanes = express(row(gpu="T4", intra_link="PCIe Gen3")).design.cluster.groups[0].inside
    assert said.bandwidth * said.efficiency == 6.25e9
    assert said.across_sockets / 6.25e9 == pytest.approx(lanes.across_sockets / (lanes.bandwidth * lanes.efficiency))


def test_pods_of_tpus_that_are_not_whole_are_alike() -> None:
    """As PaLM's 6,144 TPU v4 in two pods (2204.02311)."""
    assumed: list[str] = []
    found = machines_of(row(gpu="TPU v4", n_gpus="6144", gpus_per_node=""), assumed=assumed)
    assert not isinstance(found, str)
    assert found.spec.groups[0].rack_nodes == 3072 // 4
    assert assumed


SLICED = {
    "framework": "MaxText",
    "gpu": "TPU v5p",
    "n_gpus": "128",
    "gpus_per_node": "",
    "tp": "4",
    "pp": "1",
    "dp": "32",
    "gbs": "64",
    "precision": "bf16",
}


@pytest.mark.parametrize("said", [{"inter_link": "network between 2 slices of 64"}, {"extra": "slices=2"}])
def test_slices_of_tpus_are_tori_of_their_own(said: dict[str, str]) -> None:
    """As the second column of MaxText's README for v5p; 128 chips would be one torus."""
    whole, halves = (express(row(**SLICED | changes)).design.cluster.groups[0] for changes in ({}, said))
    assert (whole.rack_nodes, halves.rack_nodes) == (8960 // 4, 16)


@pytest.mark.parametrize(
    ("changes", "divided"),
    [
        ({"zero": "3"}, 32),
        ({"zero": "hsdp", "extra": "slices=2"}, 16),
        ({"zero": "3", "extra": "slices=2"}, 16),
        ({"zero": "3", "extra": "slices=2 dcn_fsdp=2"}, 32),
        ({"zero": "3", "extra": "slices=2", "framework": "AXLearn"}, 32),
    ],
)
def test_maxtext_divides_parameters_in_a_slice(changes: dict[str, str], divided: int) -> None:
    """Over 64 chips of a slice by four tensor ranks, unless it is told to divide them over all."""
    sizes = {axis.name: axis.size for axis in express(row(**SLICED | changes)).design.plan.axes}
    assert sizes[AxisName.SHARD] == divided
    assert sizes[AxisName.SHARD] * sizes[AxisName.REPLICATE] == 32


def test_sockets_reach_more_of_a_slow_line_than_of_a_fast_one() -> None:
    """0.84 of 10 Gb/s is what tensor ranks on 64 nodes of one V100 reach (DS3Lab's log of GPT-3 XL)."""
    reached = {
        rate: express(row(inter_link=f"Ethernet {rate} Gb/s")).design.cluster.groups[0].nic.efficiency
        for rate in (10, 25, 50, 100)
    }
    assert reached[10] == pytest.approx(0.84, abs=0.01)
    assert 0.6 < reached[25] < reached[10]
    assert reached[50] == reached[100] == 0.6


@pytest.mark.parametrize("chip", ["TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x"])
def test_activations_of_tpus_travel_to_their_hosts(chip: str) -> None:
    """MaxText's recipes offload what a layer was given."""
    plan = {"tp": "1", "pp": "1", "dp": "64", "n_gpus": "64", "gpus_per_node": "", "zero": "3", "offload": "act"}
    found = replay(row(gpu=chip, framework="MaxText", precision="bf16", recompute="full", mbs="1", **plan))
    assert found.reason == ""
