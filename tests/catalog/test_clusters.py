from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import catalog
from meshwright.catalog import machine
from meshwright.catalog.devices import SHEETS, devices, find_device
from meshwright.catalog.nodes import nodes
from meshwright.spec.cluster import ClusterSpec, Collective, DeviceKind, Precision
from meshwright.spec.errors import ConfigError

SOURCED = (
    "memory_bytes",
    "memory_bandwidth",
    "peak_flops",
    "matrix",
    "memory_fraction",
    "attention_fraction",
    "launch_seconds",
    "reserved_bytes",
    "usable_fraction",
    "watts",
)


def refused(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        catalog.load_cluster(name)
    return str(caught.value)


@pytest.mark.parametrize("name", [sheet.name for sheet in SHEETS])
def test_every_number_of_a_device_has_a_source(name: str) -> None:
    device = devices()[name]
    missing = [key for key in SOURCED if not device.sources.get(key)]
    assert missing == []
    assert (device.hours_between_failures is None) == ("hours_between_failures" not in device.sources)
    assert (device.price_per_hour is None) == ("price_per_hour" not in device.sources)
    assert set(device.peak_flops) == set(device.matrix)
    assert name in nodes()


def test_what_is_known_by_analogy_is_so_with_one_device() -> None:
    for name in ("GB200", "GB300", "B300", "H200", "H20"):
        sources = catalog.load_cluster(f"8x{name}").groups[0].device.sources.values()
        assert not [source for source in sources if source.count("by analogy with") > 1 and ": by analogy" in source]


def test_every_number_of_a_link_has_a_source() -> None:
    for entry in catalog.clusters():
        cluster = catalog.load_cluster(entry.name)
        links = [link for group in cluster.groups for link in (group.inside, group.nic, group.rack, group.host)]
        for link in filter(None, [*links, cluster.wide_area]):
            assert {"bandwidth", "latency_seconds", "efficiency"} <= set(link.sources)
            assert not link.fits or "fits" in link.sources
            assert link.sums is None or "sums" in link.sources
            assert link.peers is None or "peers" in link.sources
        for group in cluster.groups:
            assert (group.host is None) == (group.host_bytes is None) == (group.host_bandwidth is None)
            assert group.host is None or {"host_bytes", "host_bandwidth"} <= set(group.host.sources)
        assert cluster.source


def test_half_a_node_has_half_of_its_adapters_and_of_its_memory() -> None:
    whole, half = (catalog.load_cluster(f"{count}xH100").groups[0] for count in (8, 4))
    assert whole.host_bytes == 2 * half.host_bytes == 2000e9
    assert whole.nics == 2 * half.nics


def test_six_devices_a_node() -> None:
    group = catalog.load_cluster("summit").groups[0]
    assert (group.devices_per_node, group.nics, group.num_devices) == (6, 2, 27648)


def test_aliases_mean_one_device_each() -> None:
    for sheet in SHEETS:
        assert all(find_device(alias) is devices()[sheet.name] for alias in (sheet.name, *sheet.aliases))
    assert find_device("a100") is devices()["A100-80GB"]
    assert find_device("Z1000") is None


def test_precisions_are_those_of_the_hardware() -> None:
    assert Precision.FP8 in devices()["H100"].peak_flops
    assert Precision.FP8 not in devices()["A100-80GB"].peak_flops
    assert Precision.BF16 not in devices()["V100-32GB"].peak_flops
    assert devices()["A100-80GB"].peak_flops[Precision.BF16] == 312e12
    assert devices()["MI250X-GCD"].kind is DeviceKind.ROCM


def test_the_failure_rate_is_that_of_llama_3() -> None:
    hours = devices()["H100"].hours_between_failures
    assert hours is not None
    assert hours / 16384 == pytest.approx(54 * 24 / 419)


def test_measured_collectives_are_kept_as_times_of_the_whole_tensor() -> None:
    fits = {fit.operation: fit for fit in nodes()["H100"].inside.fits}
    reduce = fits[Collective.ALL_REDUCE]
    # Bus bandwidth of an all-reduce among n is 2 (n - 1) / n of the tensor over the time.
    assert reduce.bytes_per_second * 14 / 8 == pytest.approx(444e9)
    assert fits[Collective.ALL_GATHER].bytes_per_second * 7 / 8 == pytest.approx(336e9)


@pytest.mark.parametrize(
    ("name", "num_nodes", "per_node", "nics", "device"),
    [
        ("64xH100", 8, 8, 8, "H100"),
        ("4096xA100-80GB", 512, 8, 8, "A100-80GB"),
        ("16384xH100", 2048, 8, 8, "H100"),
        ("16_384xh100", 2048, 8, 8, "H100"),
        ("8xRTX-4090", 1, 8, 1, "RTX-4090"),
        ("8 x rtx4090", 1, 8, 1, "RTX-4090"),
        ("4xH100", 1, 4, 4, "H100"),
        ("1xT4", 1, 1, 1, "T4"),
        ("2x8xA100-80GB", 2, 8, 8, "A100-80GB"),
        ("3x4xH100", 3, 4, 4, "H100"),
        ("72xGB200", 18, 4, 4, "GB200"),
        ("selene:3072", 384, 8, 8, "A100-80GB"),
        ("Frontier:1024", 128, 8, 4, "MI250X-GCD"),
        ("DGX H100", 1, 8, 8, "H100"),
    ],
)
def test_shorthand(name: str, num_nodes: int, per_node: int, nics: int, device: str) -> None:
    (group,) = catalog.load_cluster(name).groups
    assert (group.num_nodes, group.devices_per_node, group.nics, group.device.name) == (
        num_nodes,
        per_node,
        nics,
        device,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("64xH10O", "no device is called 'H10O'; did you mean 'H100'?"),
        ("64xA100-80BG", "did you mean 'A100-80GB'"),
        ("8xzzzzz", "see H100"),
        ("12xH100", "12 devices do not fill nodes (nodes of this device hold 8); ask for 8 or 16"),
        ("0xH100", "has no device"),
        ("2x0xH100", "has no device"),
        ("10_000_008xH100", "10,000,008 devices are more than anyone has; at most 10,000,000"),
        ("H100", "say how many: 8xH100"),
        ("sellene", "did you mean 'selene'?"),
        ("selene:12", "ask for 8 or 16"),
        ("selene:0", "has no device"),
        ("mixed:8", "mixed has one size"),
        ("local:0", "no worker"),
        ("nothing.toml", "no such file"),
        ("8_xH100", "8_ is not a number of devices; write a whole number from 1 to 999999999: 8xH100"),
        ("9" * 5000 + "xH100", "99999999999999999999... is not a number of devices"),
        ("-1xH100", "-1 is not a number of devices"),
        ("8.5xH100", "8.5 is not a number of devices"),
        ("x8H100", "no cluster is called 'x8H100'; did you mean 8xH100? write COUNTxDEVICE (64xH100), "),
        ("H100x8", "did you mean 8xH100?"),
        ("H100:8", "did you mean 8xH100?"),
        ("8x-H100", "did you mean 8xH100?"),
        ("2x8H100", "no device is called '8H100'; did you mean 2x8xH100?"),
        ("8x8x8xH100", "has three counts (nodes x devices of each are two)"),
        ("8x", "cluster 8x: is a count without a device; name one: 8xH100"),
        ("8xH1000", "no device is called 'H1000'; did you mean 'H100'"),
        ("8xH100,8xA100", "(parts are joined by +); write 8xH100+8xA100"),
        ("13xH100", "ask for 8 or 16, or say nodes x devices (13x1x...)"),
        ("selene:", "no cluster is called 'selene:' (no number is after the colon); write selene, or selene:8"),
        ("local:x", "('x' is not a number of devices); write local, or local:8"),
        ("", "cluster: names nothing; write COUNTxDEVICE"),
        ("gaudi2", 'describe it in a cluster file (like = "A100-80GB", and what differs), as docs/cluster.md'),
        ("a\0b", "no cluster is called"),
    ],
)
def test_a_wrong_name_says_what_would_be_right(name: str, expected: str) -> None:
    assert expected in refused(name)


def test_sites_and_generations_may_differ() -> None:
    sites = catalog.load_cluster("two-sites")
    assert sites.sites == ("east", "west")
    assert sites.wide_area is not None
    mixed = catalog.load_cluster("mixed")
    assert [group.device.name for group in mixed.groups] == ["H100", "A100-80GB"]
    assert mixed.groups[0].nic == mixed.groups[1].nic


def test_every_listed_cluster_loads_and_is_possible(tmp_path: Path) -> None:
    for entry in catalog.clusters():
        cluster = catalog.load_cluster(entry.name)
        catalog.save(cluster, tmp_path / "cluster.json")
        assert catalog.load_cluster(str(tmp_path / "cluster.json")) == cluster


def test_a_cluster_is_written_and_read_as_toml(tmp_path: Path) -> None:
    for name in ("64xH100", "two-sites", "gb200-nvl72", "local:4"):
        cluster = catalog.load_cluster(name)
        catalog.save(cluster, tmp_path / "cluster.toml")
        assert catalog.load_cluster(str(tmp_path / "cluster.toml")) == cluster


def test_a_file_with_impossible_numbers_is_refused_with_their_lines(tmp_path: Path) -> None:
    cluster = catalog.load_cluster("8xH100")
    (group,) = cluster.groups
    bad = replace(group, num_nodes=0, device=replace(group.device, memory_bytes=-1.0, matrix={}), site="a")
    file = tmp_path / "bad.toml"
    catalog.save(replace(cluster, groups=(bad, replace(group, site="b"))), file)
    told = refused(str(file))
    line = 1 + file.read_text().splitlines().index("num_nodes = 0")
    assert f"{file}:{line} groups[0].num_nodes: 0 is not positive" in told
    assert "groups[0].device.memory_bytes: -1.0 is not positive" in told
    assert "groups[0].device.matrix: no curve for" in told
    assert "sites are apart and no wide_area joins them" in told
    catalog.save(replace(cluster, groups=()), file)
    assert "at least one group" in refused(str(file))
    catalog.save(replace(cluster, groups=(replace(group, num_nodes=10**9),)), file)
    assert "8,000,000,000 devices are more than anyone has" in refused(str(file))


def test_local_shares_cores_and_memory() -> None:
    cluster = catalog.local_cluster(cores=2, memory_bytes=8 * 2**30, devices=4)
    (group,) = cluster.groups
    assert (group.cores, group.devices_per_node, group.device.memory_bytes) == (2, 4, 2 * 2**30)
    assert group.device.kind is DeviceKind.CPU
    assert len(group.device.scaling) == 2
    assert "not measured" in cluster.source
    assert {fit.ranks for fit in group.inside.fits} == {2, 4, 8}


def test_processors_without_arithmetic_of_bf16_are_slower_in_it() -> None:
    def peaks(speed: float) -> Mapping[Precision, float]:
        return (
            catalog.local_cluster(cores=2, memory_bytes=2**33, devices=2, bf16_speed=speed).groups[0].device.peak_flops
        )

    assert peaks(0.02)[Precision.BF16] == pytest.approx(0.02 * peaks(0.02)[Precision.FP32])
    assert peaks(1.0)[Precision.BF16] == peaks(1.0)[Precision.FP32]


@pytest.mark.parametrize(
    ("flags", "slower"),
    [("fpu avx2", True), ("fpu avx2 avx512bw", True), ("avx2 avx512bw avx512_bf16", False), ("", False)],
)
def test_what_a_processor_has_units_for_is_read_of_its_flags(flags: str, slower: bool, tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert (machine.this_machine(cpu_info=told).bf16_speed < 1.0) is slower
    assert machine.this_machine(cpu_info=tmp_path / "none").bf16_speed == 1.0


def test_impossible_local_clusters_are_refused_whole() -> None:
    with pytest.raises(ConfigError) as caught:
        catalog.local_cluster(cores=0, memory_bytes=-1, devices=0)
    assert [problem.where for problem in caught.value.problems] == ["cores", "memory_bytes", "devices"]


def test_local_is_this_machine() -> None:
    here = catalog.this_machine()
    cluster = catalog.load_cluster("local")
    assert cluster.num_devices == here.cores
    assert catalog.load_cluster("local:4").num_devices == 4
    assert catalog.load_cluster("local:4").groups[0].device.memory_bytes == here.memory_bytes / 4


def test_a_calibration_of_this_machine_is_used_and_says_so(tmp_path: Path) -> None:
    path = catalog.calibration_path(tmp_path, catalog.this_machine().fingerprint)
    assert catalog.load_cluster("local", cache=tmp_path) == catalog.load_cluster("local")
    measured = catalog.load_cluster("local:2")
    device = replace(measured.groups[0].device, memory_bandwidth=77e9)
    measured = replace(measured, groups=(replace(measured.groups[0], device=device),), source="measured on a Friday")
    path.parent.mkdir(parents=True)
    catalog.save(measured, path)
    found: ClusterSpec = catalog.load_cluster("local:4", cache=tmp_path)
    assert found.groups[0].device.memory_bandwidth == 77e9
    assert (found.num_devices, found.groups[0].device.memory_bytes) == (4, device.memory_bytes / 2)
    assert found.source == "measured on a Friday"
    assert catalog.load_cluster("local:4").groups[0].device.memory_bandwidth != 77e9
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        catalog.load_cluster("local", cache=tmp_path)


def test_a_container_bounds_the_machine(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("cpu family\t: 6\nmodel\t\t: 85\nmodel name\t: A Processor\ncpu family\t: 7\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(str(2**30) + "\n")
    bounded = machine.this_machine(cgroup=tmp_path, cpu_info=info)
    assert (bounded.cores, bounded.memory_bytes) == (1, 2**30)
    assert bounded.processor == "A Processor (family 6, model 85)"
    assert bounded.sources == {"cores": bounded.sources["cores"], "memory": "cgroup limit"}
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    free = machine.this_machine(cgroup=tmp_path, cpu_info=info)
    assert free.memory_bytes > 2**30
    assert free.fingerprint != bounded.fingerprint
    assert free.fingerprint == machine.this_machine(cgroup=tmp_path, cpu_info=info).fingerprint
    assert machine.cpu_quota(tmp_path / "nowhere") is None


def test_a_package_that_is_not_there_is_told_without_importing() -> None:
    assert machine.installed("no-such-package") == "not installed"
    assert machine.installed("numpy")[0].isdigit()


def test_the_catalog_plans_without_torch_or_numpy() -> None:
    code = (
        "import sys; from meshwright import catalog; catalog.load_model('llama-3.1-405b'); "
        "catalog.load_cluster('16384xH100'); catalog.load_cluster('local'); catalog.load_job(None); catalog.models(); "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_kinds_of_nodes_are_added_in_the_order_they_are_written() -> None:
    cluster = catalog.load_cluster("16xH100 + 2x4xA100-40GB+8xV100")
    assert [(group.num_devices, group.device.name) for group in cluster.groups] == [
        (16, "H100"),
        (8, "A100-40GB"),
        (8, catalog.load_cluster("8xV100").groups[0].device.name),
    ]
    assert len({group.name for group in cluster.groups}) == 3
    assert len(cluster.sites) == 1
    alone = catalog.load_cluster("16xH100").groups[0]
    assert cluster.groups[0] == replace(alone, name=cluster.groups[0].name)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("16xH100+32xA10O", "cluster 16xH100+32xA10O: no device is called 'A10O'; did you mean"),
        ("12xH100+12xA100", "12 devices do not fill nodes"),
        ("16xH100+two-sites", "'two-sites' cannot be one part of a cluster"),
        ("16xH100+local:2", "'local:2' cannot be one part of a cluster"),
        (
            "16xH100+",
            "cluster 16xH100+: ends with + (+ joins two parts); write 16xH100, or name another part: 16xH100+8",
        ),
        ("+16xH100", "begins with + (+ joins two parts); write 16xH100"),
        ("8xH100++8xA100", "has nothing between one + and the next (+ joins two parts); write 8xH100+8xA100"),
        ("+", "begins and ends with +"),
        ("8xH100+nowhere.toml", "cluster 8xH100+nowhere.toml: nowhere.toml: no such file"),
    ],
)
def test_parts_that_are_wrong_are_told(name: str, told: str) -> None:
    assert told in refused(name)


def test_every_wrong_part_is_told_at_once() -> None:
    assert len(refused("8xH10O+8xA10O").split("did you mean")) == 3


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    return str(path)


def test_a_device_by_name_brings_its_usual_node(tmp_path: Path) -> None:
    text = 'name = "ours"\n[[groups]]\ndevice = "a100"\nnum_nodes = 3\ndevices_per_node = 4\nnic.bandwidth = "10GB/s"\n'
    (group,) = catalog.load_cluster(written(tmp_path, text)).groups
    usual = catalog.load_cluster("3x4xA100-80GB").groups[0]
    assert group.nic.bandwidth == 10e9
    assert group.nic.sources["bandwidth"] == "the cluster file"
    assert group.nic.latency_seconds == usual.nic.latency_seconds
    assert group.nic.fits == ()
    assert replace(group, nic=usual.nic) == usual


def test_a_device_that_is_not_known_is_told_with_its_line(tmp_path: Path) -> None:
    told = refused(written(tmp_path, 'name = "ours"\n[[groups]]\nnum_nodes = 2\ndevice = "H10O"\n'))
    assert "machines.toml:4 groups[0].device: no device is called 'H10O'; did you mean 'H100'" in told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "nic.bandwidth = 50",
            "50 bytes a second is less than any machine has (a number without a unit is bytes a second); write 50GB/s",
        ),
        ("nic.bandwidth = 5000", "write 5000MB/s"),
        ("inside.latency_seconds = 5", "5 seconds is more than any machine has"),
        ("host_bytes = 512", "write 512GiB"),
    ],
)
def test_a_forgotten_unit_is_told_with_the_nearest(line: str, told: str, tmp_path: Path) -> None:
    text = f'name = "ours"\n[[groups]]\ndevice = "H100"\n{line}\n'
    assert f"machines.toml:4 groups[0].{line.split()[0]}: " in refused(written(tmp_path, text))
    assert told in refused(written(tmp_path, text))
