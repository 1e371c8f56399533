"""Nodes as they are sold: how many devices, what joins them inside, and how they reach out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from meshwright.catalog.devices import devices
from meshwright.spec.cluster import Collective, CollectiveFit, DeviceSpec, Link, NodeGroup

GB = 1e9

_SHARE = "0.7 of the line rate reproduces the step times of 2104.04473, table 1, within 9 %"
_NEAR = "by analogy with A100 nodes on InfiniBand; not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One kind of node; `rack` joins `rack_nodes` of them faster than the network does."""

    devices: int
    inside: Link
    nic: Link
    nics: int = 1
    rack: Link | None = None
    rack_nodes: int | None = None

    def group(self, device: DeviceSpec, *, nodes: int, per_node: int | None = None, name: str = "") -> NodeGroup:
        """`nodes` of this kind holding `device`; adapters are in proportion where a node is not full."""
        count = self.devices if per_node is None else per_node
        return NodeGroup(
            name=name or device.name.lower(),
            device=device,
            num_nodes=nodes,
            devices_per_node=count,
            inside=self.inside,
            nic=self.nic,
            nics=max(1, self.nics * count // self.devices),
            rack=self.rack,
            rack_nodes=self.rack_nodes,
        )


def _fit(operation: Collective, *, latency_us: float, whole_gb: float) -> CollectiveFit:
    return CollectiveFit(
        operation=operation, ranks=8, latency_seconds=latency_us * 1e-6, bytes_per_second=whole_gb * GB
    )


NVLINK_A100 = Link(
    bandwidth=300 * GB,
    latency_seconds=3.4e-6,
    efficiency=0.74,
    fits=(_fit(Collective.ALL_REDUCE, latency_us=24, whole_gb=222 * 8 / 14),),
    sources={
        "bandwidth": "NVIDIA A100 data sheet: NVLink 3, 600 GB/s both ways",
        "efficiency": "bus bandwidth of all-reduce among 8, 222 GB/s, over 300",
        "latency_seconds": "24 us of that all-reduce over its 14 steps",
        "fits": "NCCL all-reduce among 8 A100 SXM (tables of aiconfigurator 0.12.0): 24 us and 222 GB/s of bus",
    },
)
NVLINK_H100 = Link(
    bandwidth=450 * GB,
    latency_seconds=3.4e-6,
    efficiency=0.75,
    fits=(
        _fit(Collective.ALL_REDUCE, latency_us=18, whole_gb=444 * 8 / 14),
        _fit(Collective.ALL_GATHER, latency_us=18, whole_gb=336 * 8 / 7),
        _fit(Collective.REDUCE_SCATTER, latency_us=18, whole_gb=336 * 8 / 7),
    ),
    sources={
        "bandwidth": "NVIDIA H100 data sheet: NVLink 4, 900 GB/s both ways",
        "efficiency": "bus bandwidth of all-gather among 8, 336 GB/s, over 450",
        "latency_seconds": "18 us of all-reduce among 8 over its 14 steps",
        "fits": "NCCL among 8 H100 SXM (tables of aiconfigurator 0.12.0): all-reduce 18 us and 444 GB/s of bus with "
        "in-network sums, all-gather and reduce-scatter 336 GB/s; the latency of the last two by analogy",
    },
)
NVLINK_B200 = Link(
    bandwidth=900 * GB,
    latency_seconds=3.4e-6,
    efficiency=0.75,
    sources={
        "bandwidth": "NVIDIA B200 data sheet: NVLink 5, 1,800 GB/s both ways",
        "efficiency": "by analogy with H100; not measured",
        "latency_seconds": "by analogy with H100",
    },
)
NVLINK_V100 = Link(
    bandwidth=150 * GB,
    latency_seconds=3.4e-6,
    efficiency=0.7,
    sources={
        "bandwidth": "NVIDIA V100 data sheet: NVLink 2, 300 GB/s both ways",
        "efficiency": "by analogy with A100; not measured",
        "latency_seconds": "by analogy with A100",
    },
)
INFINITY_MI250X = Link(
    bandwidth=50 * GB,
    latency_seconds=5e-6,
    efficiency=0.7,
    sources={
        "bandwidth": "Frontier user guide: 50 GB/s each way on the slowest Infinity Fabric links between dies",
        "efficiency": "by analogy with A100; not measured",
        "latency_seconds": "typical of RCCL; not measured",
    },
)
INFINITY_MI300X = Link(
    bandwidth=448 * GB,
    latency_seconds=3e-6,
    efficiency=0.7,
    sources={
        "bandwidth": "AMD MI300X data sheet: seven links of 128 GB/s both ways",
        "efficiency": "by analogy with A100; not measured",
        "latency_seconds": "typical of RCCL; not measured",
    },
)


def pcie(*, generation: int) -> Link:
    """Sixteen lanes of PCI Express, shared by nobody."""
    gigabytes = {3: 15.75, 4: 31.5, 5: 63.0}[generation]
    return Link(
        bandwidth=gigabytes * GB,
        latency_seconds=5e-6,
        efficiency=0.6,
        sources={
            "bandwidth": f"PCI Express {generation}.0, sixteen lanes each way",
            "efficiency": "copies through host memory; by analogy, not measured",
            "latency_seconds": "typical of NCCL through host memory; not measured",
        },
    )


def network(*, gigabits: float, title: str, latency_us: float = 10.0, efficiency: float = 0.7) -> Link:
    """One adapter of `gigabits` each way."""
    return Link(
        bandwidth=gigabits / 8 * GB,
        latency_seconds=latency_us * 1e-6,
        efficiency=efficiency,
        sources={
            "bandwidth": title,
            "efficiency": _SHARE if "HDR" in title else _NEAR,
            "latency_seconds": "typical of a step of NCCL across nodes; not measured",
        },
    )


HDR = network(gigabits=200, title="InfiniBand HDR, 200 Gb/s an adapter")
NDR = network(gigabits=400, title="InfiniBand NDR, 400 Gb/s an adapter")
SLINGSHOT = network(gigabits=200, title="Slingshot 11, 200 Gb/s an adapter (2312.12705: 25 GB/s)")


def ethernet(*, gigabits: float, title: str) -> Link:
    """One adapter of Ethernet without remote memory access."""
    return network(gigabits=gigabits, title=title, latency_us=30.0, efficiency=0.6)


@cache
def nodes() -> Mapping[str, Node]:
    """The usual node of every device, by the device's name."""
    dgx_a100 = Node(devices=8, inside=NVLINK_A100, nic=HDR, nics=8)
    dgx_h100 = Node(devices=8, inside=NVLINK_H100, nic=NDR, nics=8)
    hgx_b200 = replace(dgx_h100, inside=NVLINK_B200)
    cloud = ethernet(gigabits=100, title="cloud network, 100 Gb/s a node")
    pcie4 = Node(devices=8, inside=pcie(generation=4), nic=cloud)
    return MappingProxyType(
        {
            "H100": dgx_h100,
            "H100-96GB": dgx_h100,
            "H200": dgx_h100,
            "B200": hgx_b200,
            "GB200": Node(devices=4, inside=NVLINK_B200, nic=NDR, nics=4, rack=NVLINK_B200, rack_nodes=18),
            "H100-PCIe": replace(pcie4, inside=pcie(generation=5)),
            "A100-80GB": dgx_a100,
            "A100-40GB": dgx_a100,
            "A100-80GB-PCIe": pcie4,
            "A100-40GB-PCIe": pcie4,
            "V100-32GB": Node(devices=8, inside=NVLINK_V100, nic=cloud),
            "V100-16GB": Node(devices=8, inside=NVLINK_V100, nic=cloud),
            "T4": Node(
                devices=4,
                inside=pcie(generation=3),
                nic=ethernet(gigabits=50, title="cloud network, 50 Gb/s a node (as AMP's trials on T4 nodes)"),
            ),
            "A10G": pcie4,
            "L4": pcie4,
            "L40S": pcie4,
            "RTX-4090": pcie4,
            "RTX-3090": pcie4,
            "MI250X-GCD": Node(devices=8, inside=INFINITY_MI250X, nic=SLINGSHOT, nics=4),
            "MI300X": Node(devices=8, inside=INFINITY_MI300X, nic=NDR, nics=8),
        }
    )


def group_of(device: str, *, nodes_count: int, per_node: int | None = None, name: str = "") -> NodeGroup:
    """`nodes_count` usual nodes of the device preset `device`."""
    return nodes()[device].group(devices()[device], nodes=nodes_count, per_node=per_node, name=name)
