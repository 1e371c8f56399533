"""Nodes as they are sold: how many devices, what joins them inside, and how they reach out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from meshwright.catalog.devices import devices
from meshwright.catalog.node_links import (
    CLOUD,
    GB,
    HDR,
    INFINITY_MI250X,
    INFINITY_MI300X,
    NDR,
    NVLINK_A100,
    NVLINK_A100_QUAD,
    NVLINK_B200,
    NVLINK_GB200,
    NVLINK_H100,
    NVLINK_H100_QUAD,
    NVLINK_P100,
    NVLINK_V100,
    PCIE_GB,
    SLINGSHOT,
    XDR,
    ethernet,
    ici,
    pcie,
)
from meshwright.spec.cluster import DeviceSpec, Link, NodeGroup

_QUAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node's processors: the link from each device to their memory, its bytes, and bytes/s that they stream, None
    where nobody says."""

    link: Link
    num_bytes: float
    bandwidth: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One kind of node; `rack` joins `rack_nodes` of them faster than the network does, and `quad` the devices of one
    that has four."""

    devices: int
    inside: Link
    nic: Link
    nics: int = 1
    rack: Link | None = None
    rack_nodes: int | None = None
    quad: Link | None = None
    host: Host | None = None

    def group(
        self, device: DeviceSpec, *, nodes: int, per_node: int | None = None, whole: bool = True, name: str = ""
    ) -> NodeGroup:
        """`nodes` of this kind holding `device`; adapters and memory in proportion to the devices.

        A rack has as many devices however many of them are called a node. `per_node` are the `whole` of a node's
        devices, or else some of the usual number.
        """
        count = self.devices if per_node is None else per_node
        racked = self.rack_nodes and self.rack_nodes * self.devices // max(count, self.devices)
        return NodeGroup(
            name=name or device.name.lower(),
            device=device,
            num_nodes=nodes,
            devices_per_node=count,
            inside=self.quad if self.quad and whole and count == _QUAD else self.inside,
            nic=self.nic,
            nics=max(1, self.nics * count // self.devices),
            rack=self.rack if racked else None,
            rack_nodes=racked or None,
            host=self.host.link if self.host else None,
            host_bytes=self.host.num_bytes * count / self.devices if self.host else None,
            host_bandwidth=self.host.bandwidth * count / self.devices if self.host and self.host.bandwidth else None,
        )


def _host(link: Link, *, gigabytes: float, bandwidth_gb: float, title: str) -> Host:
    sources = {"host_bytes": title, "host_bandwidth": title}
    return Host(
        link=replace(link, sources={**link.sources, **sources}),
        num_bytes=gigabytes * GB,
        bandwidth=bandwidth_gb * GB,
    )


def _copies(*, gigabytes: float, title: str) -> Link:
    """A link to the host's memory that copy engines fill: no collective runs over it."""
    return Link(
        bandwidth=gigabytes * GB,
        latency_seconds=10e-6,
        efficiency=0.8,
        sources={
            "bandwidth": title,
            "efficiency": "pinned copies reach about 25 of 31.5 GB/s of PCI Express 4.0; elsewhere by analogy",
            "latency_seconds": "typical of starting a copy; not measured",
        },
    )


def _pcie_host(generation: int, *, gigabytes: float, bandwidth_gb: float, title: str) -> Host:
    lanes = _copies(gigabytes=PCIE_GB[generation], title=f"PCI Express {generation}.0, sixteen lanes each way")
    return _host(lanes, gigabytes=gigabytes, bandwidth_gb=bandwidth_gb, title=title)


def _shared(host: Host, *, devices: int, title: str) -> Host:
    """Of `host`, where so many devices are under one switch with one way up to the processor."""
    link = replace(host.link, oversubscription=float(devices), sources={**host.link.sources, "oversubscription": title})
    return replace(host, link=link)


def _dgx() -> dict[str, Node]:
    """NVIDIA's boards with NVLink, eight devices but for GB200 and GB300, whose racks are one NVLink domain."""
    rome = "two EPYC 7742 with eight channels of DDR4-3200 each; DGX A100 data sheet: {} TB"
    sapphire = "two Xeon 8480C with eight channels of DDR5-4800 each, 2 TB: DGX H100 data sheet"
    emerald = "two Xeon 8570 with eight channels of DDR5-5600 each, 2 TB: DGX B200 data sheet"
    grace = "two Grace with 480 GB of LPDDR5X each at up to 512 GB/s: NVIDIA GB200 NVL72 data sheet"
    broadwell = "two Xeon E5-2698 v4 with four channels of DDR4-2133 each, 512 GB: DGX-1 data sheet"
    a100 = Node(devices=8, inside=NVLINK_A100, nic=HDR, nics=8, quad=NVLINK_A100_QUAD)
    h100_host = _pcie_host(5, gigabytes=2000, bandwidth_gb=614.4, title=sapphire)
    h100 = Node(devices=8, inside=NVLINK_H100, nic=NDR, nics=8, quad=NVLINK_H100_QUAD, host=h100_host)
    b200_host = _pcie_host(5, gigabytes=2000, bandwidth_gb=716.8, title=emerald)
    b200 = replace(h100, inside=NVLINK_B200, quad=None, host=b200_host)
    chip = _copies(gigabytes=225, title="NVLink-C2C, 900 GB/s both ways between a Grace and its two GPUs")
    superchips = Node(
        devices=4,
        inside=NVLINK_GB200,
        nic=NDR,
        nics=4,
        rack=NVLINK_GB200,
        rack_nodes=18,
        host=_host(chip, gigabytes=960, bandwidth_gb=1024, title=grace),
    )
    v100_host = _pcie_host(3, gigabytes=512, bandwidth_gb=136.5, title=broadwell)
    pairs = (
        "two GPUs and an adapter under each PCI Express switch (nvidia-smi topo -m of a DGX-1, gist ashwin/e139748b; "
        "NVIDIA's DGX-1 white paper, figure 4, second-hand), taken to have sixteen lanes up"
    )
    v100 = Node(devices=8, inside=NVLINK_V100, nic=CLOUD, host=_shared(v100_host, devices=2, title=pairs))
    paired = "pairs of A100 SXM are PXB in nvidia-smi topo; 12 GB/s alone are 5 to 6 when all copy (nvbandwidth 11, 53)"
    hosts = {
        size: _shared(
            _pcie_host(4, gigabytes=1000 * size, bandwidth_gb=409.6, title=rome.format(size)), devices=2, title=paired
        )
        for size in (1, 2)
    }
    return {
        "A100-80GB": replace(a100, host=hosts[2]),
        "A100-40GB": replace(a100, host=hosts[1]),
        "H100": h100,
        "H100-96GB": h100,
        "H200": h100,
        "B200": b200,
        "B300": replace(b200, nic=XDR),
        "GB200": superchips,
        "GB300": replace(superchips, nic=XDR),
        "V100-32GB": v100,
        "V100-16GB": v100,
    }


def _grace() -> Host:
    """Of one Hopper and its own Grace."""
    chip = _copies(gigabytes=450, title="NVLink-C2C, 900 GB/s both ways between a Grace and its GPU")
    return _host(
        chip, gigabytes=480, bandwidth_gb=512, title="one Grace with 480 GB of LPDDR5X: NVIDIA GH200 data sheet"
    )


def _boards() -> dict[str, Node]:
    """Devices on PCI Express, in the servers that clouds sell or in one's own."""
    plain = Node(devices=8, inside=pcie(generation=4), nic=CLOUD)
    cloud = "one of AWS's {}, two sockets; bandwidth that of their DDR4-3200"
    g5, g6e = (
        _pcie_host(4, gigabytes=size, bandwidth_gb=409.6, title=cloud.format(name))
        for size, name in ((824, "g5.48xlarge and g6.48xlarge, 768 GiB"), (1649, "g6e.48xlarge, 1,536 GiB"))
    )
    own = _pcie_host(
        4, gigabytes=512, bandwidth_gb=204.8, title="an example: one EPYC with eight channels of DDR4-3200"
    )
    t4 = _pcie_host(3, gigabytes=206, bandwidth_gb=140.8, title="AWS g4dn.12xlarge, 192 GiB; six channels of DDR4-2933")
    fourth = replace(plain, host=own)
    fifth = replace(
        plain,
        inside=pcie(generation=5),
        host=_pcie_host(
            5, gigabytes=512, bandwidth_gb=307.2, title="an example: one Xeon with eight channels of DDR5-4800"
        ),
    )
    slow = ethernet(gigabits=50, title="cloud network, 50 Gb/s a node (as AMP's trials on T4 nodes)")
    return {
        "H100-PCIe": fifth,
        "A100-80GB-PCIe": fourth,
        "A100-40GB-PCIe": fourth,
        "T4": Node(devices=4, inside=pcie(generation=3), nic=slow, host=t4),
        "A10G": replace(plain, host=g5),
        "L4": replace(plain, host=g5),
        "L40S": replace(plain, host=g6e),
        "RTX-4090": fourth,
        "RTX-3090": fourth,
    }


def _others() -> dict[str, Node]:
    """AMD's accelerators, and hosts of TPUs, whose pods are one torus."""
    trento = "one EPYC 7A53 with eight channels of DDR4-3200, 512 GB: Frontier user guide"
    fabric = _copies(gigabytes=36, title="Frontier user guide: 36 GB/s each way between a die and the processor")
    azure = "Azure ND MI300X v5: 1,850 GiB; two Xeon 8480C with eight channels of DDR5-4800 each"
    mi300x_host = _pcie_host(5, gigabytes=1986, bandwidth_gb=614.4, title=azure)
    return {
        "MI250X-GCD": Node(
            devices=8,
            inside=INFINITY_MI250X,
            nic=SLINGSHOT,
            nics=4,
            host=_host(fabric, gigabytes=512, bandwidth_gb=204.8, title=trento),
        ),
        "MI300X": Node(devices=8, inside=INFINITY_MI300X, nic=NDR, nics=8, host=mi300x_host),
        "TPU-v4": _tpu(
            4,
            dims=3,
            pod=4096,
            gigabytes=300,
            datacenter=25,
            title="Cloud TPU v4: 2,400 Gb/s a chip, 3D torus",
            host=_tpu_host(gigabytes=16, memory=407, machine="Google Cloud ct4p-hightpu-4t: 407 GB"),
        ),
        "TPU-v5p": _tpu(
            4,
            dims=3,
            pod=8960,
            gigabytes=600,
            datacenter=50,
            title="Cloud TPU v5p: 4,800 Gb/s a chip, 3D torus",
            host=_tpu_host(gigabytes=15, memory=448, machine="Google Cloud ct5p-hightpu-4t: 448 GB"),
        ),
        "TPU-v5e": _tpu(
            8,
            pod=256,
            gigabytes=200,
            datacenter=25,
            title="Cloud TPU v5e: 1,600 Gb/s a chip, 2D torus",
            host=_tpu_host(gigabytes=15, memory=384, machine="Google Cloud ct5lp-hightpu-8t: 384 GB"),
        ),
        "TPU-v6e": _tpu(
            8,
            pod=256,
            gigabytes=400,
            datacenter=100,
            title="Cloud TPU v6e: 800 GB/s both ways, 2D torus",
            host=_tpu_host(gigabytes=32, memory=1440, machine="Google Cloud ct6e-standard-8t: 1,440 GB"),
        ),
    }


def _relatives() -> dict[str, Node]:
    """Nodes like better known ones with fewer or other links; their hosts are taken to be those."""
    a100, h100, boards, others = _dgx()["A100-80GB"], _dgx()["H100"], _boards(), _others()
    pcie3, pcie4, pcie5 = (
        Node(devices=8, inside=pcie(generation=number), nic=CLOUD, host=boards[like].host)
        for number, like in ((3, "T4"), (4, "A100-80GB-PCIe"), (5, "H100-PCIe"))
    )
    a800 = _like(NVLINK_A100, gigabytes=200, title="NVIDIA A800: NVLink 3, 400 GB/s both ways")
    h800 = _like(NVLINK_H100, gigabytes=200, title="NVIDIA H800: NVLink 4, 400 GB/s both ways")
    mi355x = _like(INFINITY_MI300X, gigabytes=537.6, title="AMD MI355X: seven links of 153.6 GB/s both ways")
    mi300a = _like(INFINITY_MI300X, gigabytes=384, title="AMD MI300A: two links of 128 GB/s both ways to each of three")
    mi300a = replace(mi300a, peers=3)
    mi300x = others["MI300X"]
    v2, v3 = (
        "10.1145/3360307: four links of 496 Gb/s each way a TPU v2 chip",
        "10.1145/3360307: four links of 656 Gb/s each way a TPU v3 chip; all-reduces at 340 TB/s among 1,024 "
        "(Cloud TPU v3)",
    )
    chips, cores = (
        _tpu_host(gigabytes=rate, memory=340, machine="Google Cloud TPU v3-8: 340 GB", known=False) for rate in (16, 8)
    )
    return {
        "A800-80GB": replace(a100, inside=a800, quad=None),
        "H800": replace(h100, inside=h800, quad=None),
        "H20": h100,
        "H100-NVL": pcie5,
        "H200-NVL": pcie5,
        "A800-80GB-PCIe": pcie4,
        "B100": _dgx()["B200"],
        "GH200": Node(devices=1, inside=NVLINK_H100, nic=NDR, quad=NVLINK_H100_QUAD, host=_grace()),
        **dict.fromkeys(("V100-32GB-PCIe", "V100-16GB-PCIe", "V100S-PCIe"), pcie3),
        "P100": replace(_dgx()["V100-32GB"], inside=NVLINK_P100),
        "P100-PCIe": pcie3,
        "A6000": pcie4,
        **dict.fromkeys(("A10", "A30", "A40", "L40", "RTX-6000-Ada"), pcie4),
        **dict.fromkeys(("Titan-RTX", "RTX-8000", "RTX-2080Ti", "P40"), pcie3),
        "M60": replace(pcie3, devices=4),
        "MI210": pcie4,
        "MI250-GCD": others["MI250X-GCD"],
        "MI300A": Node(devices=4, inside=mi300a, nic=SLINGSHOT, nics=4),
        "MI350X": replace(mi300x, inside=mi355x),
        "RTX-5090": pcie5,
        "MI325X": mi300x,
        "MI355X": replace(mi300x, inside=mi355x),
        "TPU-v2": _tpu(4, pod=256, gigabytes=248, datacenter=25, title=v2, host=chips),
        "TPU-v2-core": _tpu(8, pod=512, gigabytes=124, datacenter=12.5, title=f"{v2}, a core half of it", host=cores),
        "TPU-v3": _tpu(4, pod=1024, gigabytes=328, datacenter=25, title=v3, host=chips),
        "TPU-v3-core": _tpu(8, pod=2048, gigabytes=164, datacenter=12.5, title=f"{v3}, a core half of it", host=cores),
        "TPU-v7": _tpu(
            4,
            dims=3,
            pod=9216,
            gigabytes=600,
            datacenter=100,
            title="Cloud TPU7x: 1,200 GB/s both ways, 3D torus",
            host=_tpu_host(gigabytes=32, memory=960, machine="Google Cloud tpu7x-standard-4t: 960 GB", known=False),
        ),
    }


def _like(link: Link, *, gigabytes: float, title: str) -> Link:
    """The same fabric with other lanes: what was measured of it is left out."""
    return replace(
        link, bandwidth=gigabytes * GB, fits=(), sources={**link.sources, "bandwidth": title, "fits": "none"}
    )


def _tpu(devices: int, *, pod: int, gigabytes: float, datacenter: float, title: str, host: Host, dims: int = 2) -> Node:
    """A host of `devices` chips in a pod of `pod`, each with `datacenter` Gb/s of the network between pods."""
    torus = ici(gigabytes=gigabytes, title=title, torus=dims, wraps={2: 16, 3: 4}[dims])
    beyond = ethernet(
        gigabits=datacenter,
        title=f"data centre network, {datacenter:g} Gb/s a chip (Cloud TPU documents)",
        host_gigabits=datacenter * devices,
    )
    staged = replace(beyond, staged=True, sources={**beyond.sources, "staged": "XLA over several slices: Multislice"})
    return Node(
        devices=devices, inside=torus, nic=staged, nics=devices, rack=torus, rack_nodes=pod // devices, host=host
    )


def _tpu_host(*, gigabytes: float, memory: float, machine: str, known: bool = True) -> Host:
    """Of TPUs whose host's memory is `gigabytes` a second away from each, each way, in a `machine` of `memory` GB."""
    book = "How to Scale Your Model: 16 GB/s a chip each way of TPU v4, about 15 of v5, 32 of v6e"
    link = _copies(gigabytes=gigabytes, title=book if known else f"by analogy; {book}")
    return Host(
        link=replace(
            link,
            efficiency=1.0,
            sources={**link.sources, "efficiency": book, "host_bytes": machine, "host_bandwidth": "not published"},
        ),
        num_bytes=memory * GB,
        bandwidth=None,
    )


@cache
def nodes() -> Mapping[str, Node]:
    """The usual node of every device, by the device's name."""
    return MappingProxyType(_dgx() | _boards() | _others() | _relatives())


def group_of(device: str, *, nodes_count: int, per_node: int | None = None, name: str = "") -> NodeGroup:
    """`nodes_count` usual nodes of the device preset `device`."""
    return nodes()[device].group(devices()[device], nodes=nodes_count, per_node=per_node, name=name)
