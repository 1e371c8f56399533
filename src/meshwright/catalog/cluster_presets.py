"""Clusters by name, from whole machines of the papers down to one box."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.catalog.node_links import HDR, ethernet, network, pcie
from meshwright.catalog.nodes import group_of
from meshwright.spec.cluster import ClusterSpec, Link, NodeGroup

_SELENE = "DGX A100 SuperPOD with eight HDR adapters a node, as in 2104.04473, section 5"
_EDR = "InfiniBand EDR, 100 Gb/s an adapter"
_FRONTIER = "Frontier user guide and 2312.12705: four MI250X a node, each two dies, four Slingshot adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPreset:
    """A cluster by name; `nodes` is its usual size, `resizable` whether `NAME:DEVICES` may ask for another."""

    name: str
    description: str
    build: Callable[[], ClusterSpec]
    aliases: tuple[str, ...] = ()
    resizable: bool = True


def _uniform(name: str, source: str, group: NodeGroup) -> ClusterSpec:
    return ClusterSpec(name=name, groups=(replace(group, name=name),), source=source)


def _selene() -> ClusterSpec:
    return _uniform("selene", _SELENE, group_of("A100-80GB", nodes_count=560))


def _dgx_a100() -> ClusterSpec:
    return _uniform("dgx-a100", "NVIDIA DGX A100 data sheet", group_of("A100-80GB", nodes_count=1))


def _dgx_h100() -> ClusterSpec:
    return _uniform("dgx-h100", "NVIDIA DGX H100 data sheet", group_of("H100", nodes_count=1))


def _h200() -> ClusterSpec:
    return _uniform("hgx-h200", "NVIDIA HGX H200 data sheet", group_of("H200", nodes_count=1))


def _b200() -> ClusterSpec:
    return _uniform("hgx-b200", "NVIDIA HGX B200 data sheet", group_of("B200", nodes_count=1))


def _gb200() -> ClusterSpec:
    return _uniform("gb200-nvl72", "NVIDIA GB200 NVL72 data sheet", group_of("GB200", nodes_count=18))


def _frontier() -> ClusterSpec:
    return _uniform("frontier", _FRONTIER, group_of("MI250X-GCD", nodes_count=9408))


def _llama3() -> ClusterSpec:
    source = "Llama 3, 2407.21783, section 3.3: 16,384 H100, eight RoCE adapters of 400 Gb/s a node"
    roce = network(gigabits=400, title="RoCE, 400 Gb/s an adapter (2407.21783, section 3.3.1)")
    group = replace(group_of("H100", nodes_count=2048), nic=roce)
    return _uniform("llama3-h100", source, group)


def _pcie_box() -> ClusterSpec:
    source = "one server with eight RTX 4090 on PCI Express 4.0, no NVLink"
    return _uniform("pcie-box", source, group_of("RTX-4090", nodes_count=1))


def _pcie_a100() -> ClusterSpec:
    source = "four servers with eight A100 on PCI Express 4.0 and one HDR adapter each"
    group = replace(group_of("A100-80GB-PCIe", nodes_count=4), inside=pcie(generation=4))
    return _uniform("pcie-a100", source, replace(group, nic=network(gigabits=200, title="InfiniBand HDR, 200 Gb/s")))


def _t4_cloud() -> ClusterSpec:
    source = "four cloud nodes of four T4, as in AMP's trials (2210.07297)"
    return _uniform("t4-cloud", source, group_of("T4", nodes_count=4))


def _v100_cloud() -> ClusterSpec:
    source = "two cloud nodes of eight V100 16 GB on 25 Gb/s Ethernet (AWS p3.16xlarge)"
    nic = ethernet(gigabits=25, title="AWS p3.16xlarge: 25 Gb/s a node")
    return _uniform("v100-cloud", source, replace(group_of("V100-16GB", nodes_count=2), nic=nic))


def _dgx_b200() -> ClusterSpec:
    return _uniform("dgx-b200", "NVIDIA DGX B200 SuperPOD data sheet", group_of("B200", nodes_count=32))


def _dgx_1() -> ClusterSpec:
    group = replace(group_of("V100-16GB", nodes_count=1), nic=network(gigabits=100, title=_EDR), nics=4)
    return _uniform("dgx-1", "NVIDIA DGX-1 data sheet: eight V100, four EDR adapters", group)


def _summit() -> ClusterSpec:
    """Six V100 a node in two triples; NVLink joins any two of one, and each to its processor, at one speed."""
    source = "Summit user guide: 4,608 nodes of six V100 16 GB, two POWER9, NVLink 2 and two rails of EDR InfiniBand"
    group = group_of("V100-16GB", nodes_count=4608, per_node=6)
    brick, bus = "two bricks of NVLink 2, 50 GB/s each way", "X-Bus between the processors, 64 GB/s each way"
    memory = "512 GB a node, two POWER9 of 170 GB/s each (Summit user guide)"
    lane = replace(
        group.inside,
        bandwidth=50e9,
        peers=None,
        across_sockets=None,
        fits=(),
        sources={
            "bandwidth": f"{brick} (Summit user guide)",
            "efficiency": "by analogy with a DGX-1; not measured",
            "latency_seconds": group.inside.sources["latency_seconds"],
        },
    )
    inside = replace(
        lane,
        bandwidth=100e9,
        peers=2,
        across_sockets=lane.efficiency * 64e9,
        sources={
            **lane.sources,
            "bandwidth": f"{brick}, to each of the two others of a triple (Summit user guide)",
            "peers": f"{brick}, between any two of a triple (Summit user guide)",
            "across_sockets": f"{bus} (Summit user guide), of which the share is by analogy",
        },
    )
    host = replace(
        lane,
        sources={**lane.sources, **dict.fromkeys(("host_bytes", "host_bandwidth"), f"{memory} (Summit user guide)")},
    )
    nic = network(gigabits=100, title=_EDR)
    group = replace(group, inside=inside, nic=nic, nics=2, host=host, host_bytes=512e9, host_bandwidth=340e9)
    return _uniform("summit", source, group)


def _aws_p4d() -> ClusterSpec:
    nic = network(
        gigabits=100, title="AWS p4d.24xlarge: 400 Gb/s of Elastic Fabric Adapter, four of 100", latency_us=30
    )
    group = replace(group_of("A100-40GB", nodes_count=4), nic=_fabric(nic), nics=4)
    return _uniform("aws-p4d", "AWS p4d.24xlarge: eight A100 40 GB", group)


def _aws_p5() -> ClusterSpec:
    nic = network(gigabits=100, title="AWS p5.48xlarge: 3,200 Gb/s of Elastic Fabric Adapter, 32 of 100", latency_us=30)
    group = replace(group_of("H100", nodes_count=4), nic=_fabric(nic), nics=32)
    return _uniform("aws-p5", "AWS p5.48xlarge: eight H100", group)


def _gcp_a2() -> ClusterSpec:
    nic = ethernet(gigabits=100, title="Google a2-highgpu-8g: 100 Gb/s a machine")
    group = replace(group_of("A100-40GB", nodes_count=4), nic=nic, nics=1)
    return _uniform("gcp-a2", "Google a2-highgpu-8g: eight A100 40 GB", group)


def _gcp_a3() -> ClusterSpec:
    nic = ethernet(
        gigabits=200, title="Google a3-highgpu-8g: 1,000 Gb/s a machine, four adapters of 200 for the devices"
    )
    group = replace(group_of("H100", nodes_count=4), nic=nic, nics=4)
    return _uniform("gcp-a3", "Google a3-highgpu-8g: eight H100", group)


def _mi300x() -> ClusterSpec:
    source = "Azure ND MI300X v5: eight MI300X, eight NDR adapters a node"
    return _uniform("mi300x", source, group_of("MI300X", nodes_count=4))


def _fabric(nic: Link) -> Link:
    return replace(nic, sources={**nic.sources, "latency_seconds": "typical of NCCL on AWS's fabric; not measured"})


def _two_sites() -> ClusterSpec:
    return ClusterSpec(
        name="two-sites",
        groups=tuple(
            replace(group_of("H100", nodes_count=4, name=f"{site}-h100"), site=site) for site in ("east", "west")
        ),
        wide_area=Link(
            bandwidth=10e9 / 8,
            latency_seconds=30e-3,
            efficiency=0.8,
            sources={
                "bandwidth": "an example: one 10 Gb/s line between the sites",
                "latency_seconds": "an example: about 6,000 km of fibre, one way",
                "efficiency": "an example: several TCP streams",
            },
        ),
        source="an example of two sites over a wide-area line; the line's figures are not of any real one",
    )


def _mixed() -> ClusterSpec:
    source = "an example of two generations: two DGX A100 and two DGX H100 on one HDR network"
    older, newer = group_of("A100-80GB", nodes_count=2), group_of("H100", nodes_count=2)
    return ClusterSpec(name="mixed", groups=(replace(newer, nic=HDR), older), source=source)


PRESETS = (
    ClusterPreset(
        name="selene", description="560 DGX A100: 4,480 A100 80 GB, 8 x 200 Gb/s InfiniBand a node", build=_selene
    ),
    ClusterPreset(name="dgx-a100", description="one DGX A100: 8 A100 80 GB on NVLink 3", build=_dgx_a100),
    ClusterPreset(name="dgx-h100", description="one DGX H100: 8 H100 80 GB on NVLink 4", build=_dgx_h100),
    ClusterPreset(name="hgx-h200", description="one HGX H200: 8 H200 141 GB", build=_h200, aliases=("h200",)),
    ClusterPreset(name="hgx-b200", description="one HGX B200: 8 B200 180 GB", build=_b200),
    ClusterPreset(
        name="gb200-nvl72",
        description="one NVL72 rack: 72 GB200 in one NVLink domain, 18 nodes of 4",
        build=_gb200,
        aliases=("nvl72",),
    ),
    ClusterPreset(name="dgx-b200", description="32 DGX B200: 256 B200 180 GB, 8 x 400 Gb/s a node", build=_dgx_b200),
    ClusterPreset(name="dgx-1", description="one DGX-1: 8 V100 16 GB on NVLink 2, 4 x 100 Gb/s", build=_dgx_1),
    ClusterPreset(name="summit", description="4,608 nodes of 6 V100 16 GB, 2 x 100 Gb/s a node", build=_summit),
    ClusterPreset(name="mi300x", description="4 nodes of 8 MI300X, 8 x 400 Gb/s a node", build=_mi300x),
    ClusterPreset(name="aws-p4d", description="4 AWS p4d.24xlarge: 8 A100 40 GB, 400 Gb/s a node", build=_aws_p4d),
    ClusterPreset(name="aws-p5", description="4 AWS p5.48xlarge: 8 H100, 3,200 Gb/s a node", build=_aws_p5),
    ClusterPreset(name="gcp-a2", description="4 Google a2-highgpu-8g: 8 A100 40 GB, 100 Gb/s a node", build=_gcp_a2),
    ClusterPreset(name="gcp-a3", description="4 Google a3-highgpu-8g: 8 H100, 4 x 200 Gb/s a node", build=_gcp_a3),
    ClusterPreset(
        name="llama3-h100", description="2,048 nodes of 8 H100 on 400 Gb/s RoCE, as Llama 3 used", build=_llama3
    ),
    ClusterPreset(
        name="frontier",
        description="9,408 nodes of 4 MI250X (8 dies), 4 x 25 GB/s Slingshot a node",
        build=_frontier,
    ),
    ClusterPreset(name="pcie-box", description="one server with 8 RTX 4090, PCI Express only", build=_pcie_box),
    ClusterPreset(
        name="pcie-a100", description="4 servers with 8 A100 on PCI Express, one HDR adapter each", build=_pcie_a100
    ),
    ClusterPreset(name="t4-cloud", description="4 cloud nodes of 4 T4 on 50 Gb/s Ethernet", build=_t4_cloud),
    ClusterPreset(
        name="v100-cloud", description="2 cloud nodes of 8 V100 16 GB on 25 Gb/s Ethernet", build=_v100_cloud
    ),
    ClusterPreset(
        name="two-sites",
        description="2 sites of 4 DGX H100, 10 Gb/s and 30 ms between them",
        build=_two_sites,
        resizable=False,
    ),
    ClusterPreset(name="mixed", description="2 DGX H100 and 2 DGX A100 on one network", build=_mixed, resizable=False),
)
