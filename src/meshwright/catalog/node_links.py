"""Links of nodes as they are sold: in the node, to the host and to other nodes, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshwright.spec.cluster import Collective, CollectiveFit, Link

GB = 1e9
PCIE_GB: Mapping[int, float] = MappingProxyType({3: 15.75, 4: 31.5, 5: 63.0})

_SHARE = (
    "rings among 248 nodes of eight H200 reach 350 of 400 GB/s with 512 MiB (NVIDIA/nccl-tests issue 283); three of "
)
_SHARE += "A100 with four HDR adapters 96 of 100 (issue 119)"
_STEP = "a step of a plain ring over NVLink by which NCCL 2.24 chooses (its tuning.cc)"
_FAR_STEP = "a step of a plain ring over InfiniBand by which NCCL 2.24 chooses (its tuning.cc)"
_SUMS = "NVLink SHARP: the share of bandwidth that NCCL 2.24 counts on (nvlsEfficiency in src/graph/tuning.cc)"
_SOCKETS = "typical of a step of NCCL over TCP sockets; not measured"
_SOCKET_SHARE = (
    "0.94 of the line is payload, and a host's cores copy at about 80 Gb/s before it: 0.84 of 10 Gb/s is what tensor "
    "ranks on 64 nodes of one V100 reach (DS3Lab/Decentralized_FM_alpha results/gpt3_xl_fp16.md); from 50 Gb/s on 0.6, "
    "by analogy"
)
_PAYLOAD, _COPIED_GIGABITS, _LEAST_SHARE = 0.94, 80.0, 0.6


def _fit(operation: Collective, *, latency_us: float, whole_gb: float, ranks: int = 8) -> CollectiveFit:
    return CollectiveFit(
        operation=operation, ranks=ranks, latency_seconds=latency_us * 1e-6, bytes_per_second=whole_gb * GB
    )


NVLINK_A100 = Link(
    bandwidth=300 * GB,
    latency_seconds=3.4e-6,
    efficiency=0.74,
    fits=(_fit(Collective.ALL_REDUCE, latency_us=24, whole_gb=222 * 8 / 14),),
    sources={
        "bandwidth": "NVIDIA A100 data sheet: NVLink 3, 600 GB/s both ways",
        "efficiency": "bus bandwidth of all-reduce among 8, 222 GB/s, over 300",
        "latency_seconds": _STEP,
        "fits": "NCCL all-reduce among 8 A100 SXM (tables of aiconfigurator 0.12.0): 24 us and 222 GB/s of bus",
    },
)
NVLINK_H100 = Link(
    bandwidth=450 * GB,
    latency_seconds=3.4e-6,
    efficiency=0.75,
    sums=0.85,
    fits=(
        _fit(Collective.ALL_REDUCE, latency_us=18, whole_gb=444 * 8 / 14),
        _fit(Collective.ALL_GATHER, latency_us=18, whole_gb=336 * 8 / 7),
        _fit(Collective.REDUCE_SCATTER, latency_us=18, whole_gb=336 * 8 / 7),
    ),
    sources={
        "bandwidth": "NVIDIA H100 data sheet: NVLink 4, 900 GB/s both ways",
        "efficiency": "bus bandwidth of all-gather among 8, 336 GB/s, over 450",
        "sums": f"{_SUMS}, Hopper: 0.85",
        "latency_seconds": _STEP,
        "fits": "NCCL among 8 H100 SXM (tables of aiconfigurator 0.12.0): all-reduce 18 us and 444 GB/s of bus with "
        "in-network sums, all-gather and reduce-scatter 336 GB/s; the latency of the last two by analogy",
    },
)
_QUAD = "no switch: every pair of four shares a third of the links"
NVLINK_A100_QUAD = replace(
    NVLINK_A100,
    peers=3,
    fits=(),
    sources={
        **{name: NVLINK_A100.sources[name] for name in ("bandwidth", "efficiency", "latency_seconds")},
        "peers": f"{_QUAD}, four of 25 GB/s each way (NERSC, Perlmutter's architecture)",
    },
)
NVLINK_H100_QUAD = replace(
    NVLINK_H100,
    peers=3,
    sums=None,
    fits=(),
    sources={
        **{name: NVLINK_H100.sources[name] for name in ("bandwidth", "efficiency", "latency_seconds")},
        "peers": f"{_QUAD}, six of 25 GB/s each way (JSC, JUPITER's nodes of four GH200)",
    },
)
NVLINK_GB200 = Link(
    bandwidth=900 * GB,
    latency_seconds=3.4e-6,
    efficiency=0.75,
    sums=0.74,
    sources={
        "bandwidth": "NVIDIA B200 data sheet: NVLink 5, 1,800 GB/s both ways",
        "efficiency": "by analogy with H100; not measured",
        "sums": f"{_SUMS}, Blackwell: 0.74",
        "latency_seconds": _STEP,
    },
)
_SIMUMAX = "SimuMax's table of eight B200 (configs/system/b200_bf16_ceperm.json, Apache-2.0)"
NVLINK_B200 = replace(
    NVLINK_GB200,
    efficiency=0.72,
    fits=tuple(
        fit
        for ranks, all_to_all_us in ((2, 51.1), (4, 19.2), (8, 0.0))
        for hops in (ranks - 1,)
        for fit in (
            _fit(Collective.ALL_REDUCE, ranks=ranks, latency_us=22.2 + 11.0 * hops, whole_gb=717 * ranks / hops / 2),
            _fit(Collective.ALL_GATHER, ranks=ranks, latency_us=23.1 + 9.18 * hops, whole_gb=651 * ranks / hops),
            _fit(Collective.REDUCE_SCATTER, ranks=ranks, latency_us=25.6 + 8.03 * hops, whole_gb=650 * ranks / hops),
            _fit(
                Collective.ALL_TO_ALL, ranks=ranks, latency_us=all_to_all_us + 7.3 * hops, whole_gb=577 * ranks / hops
            ),
        )
    ),
    sources={
        **NVLINK_GB200.sources,
        "efficiency": f"bus bandwidth of all-gather, 651 GB/s, over 900: {_SIMUMAX}",
        "fits": f"{_SIMUMAX}: a fixed latency, one for each hop of a ring and bus bandwidths of 717 (all-reduce), 651, "
        "650 and 577 GB/s (all-to-all), in steps of 1.074e9 bytes as it counts them",
    },
)
_CUBE = "hybrid cube mesh of a DGX-1 (topology file in NVIDIA/nccl issue 671)"
NVLINK_V100 = Link(
    bandwidth=150 * GB,
    latency_seconds=3.4e-6,
    efficiency=0.89,
    peers=6,
    across_sockets=0.89 * 200 * GB,
    fits=(
        _fit(Collective.ALL_REDUCE, ranks=2, latency_us=23, whole_gb=22.5),
        _fit(Collective.ALL_REDUCE, ranks=4, latency_us=43, whole_gb=85 * 4 / 6),
        _fit(Collective.ALL_REDUCE, ranks=8, latency_us=66, whole_gb=134 * 8 / 14),
    ),
    sources={
        "bandwidth": "NVIDIA V100 data sheet: NVLink 2, 300 GB/s both ways",
        "efficiency": "bus bandwidth of all-reduce among 8, 134 GB/s, over 150",
        "peers": f"{_CUBE}: six links of 25 GB/s each way, one or two to each of four others",
        "across_sockets": f"{_CUBE}: two links between each device and one of the other four, 200 GB/s each way; 0.89 "
        "of it as of the rest",
        "latency_seconds": _STEP,
        "fits": "NCCL all-reduce among 2, 4 and 8 V100 of one node, whose pairs share one or two of six links: 1 MiB "
        "and 1 GiB of vTrain's tables (VIA-Research/vTrain trace/v100, MIT)",
    },
)
_SINGLE = f"{_CUBE}, with one link of 20 GB/s each way where that of V100 has one or two"
NVLINK_P100 = replace(
    NVLINK_V100,
    bandwidth=80 * GB,
    peers=4,
    across_sockets=0.89 * 80 * GB,
    fits=(),
    sources={
        "bandwidth": "NVIDIA P100: NVLink 1, 160 GB/s both ways",
        "efficiency": "by analogy with V100; not measured",
        "peers": _SINGLE,
        "across_sockets": f"{_SINGLE}: four between the halves; 0.89 of it as of the rest",
        "latency_seconds": _STEP,
    },
)
_PCIE = "SimuMax's table of eight A100 PCIe (configs/system/a100_pcie.json, Apache-2.0)"
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
    peers=7,
    sources={
        "peers": "64 GB/s each way to each of the seven others (SemiAnalysis, MI300X vs H100 vs H200, December 2024)",
        "bandwidth": "AMD MI300X data sheet: seven links of 128 GB/s both ways",
        "efficiency": "by analogy with A100; not measured",
        "latency_seconds": "typical of RCCL; not measured",
    },
)


def pcie(*, generation: int) -> Link:
    """Sixteen lanes of PCI Express for each device, half of which hang from either processor of a host."""
    lanes = PCIE_GB[generation] * GB
    other = "" if generation == 4 else "by analogy with the fourth generation, "
    return Link(
        bandwidth=lanes,
        latency_seconds=5.7e-6,
        efficiency=0.66,
        across_sockets=0.48 * lanes,
        sources={
            "bandwidth": f"PCI Express {generation}.0, sixteen lanes each way",
            "efficiency": f"{other}{_PCIE}: 20.8 GB/s of bus among two and four devices (all-gather, all-reduce)",
            "across_sockets": f"{other}{_PCIE}: all-gathers reach 13.5 GB/s of bus among eight devices, 7.65 among "
            "four beside another such group and 4 between two beside three, some 15 GB/s over the middle in each case",
            "latency_seconds": _STEP.replace("NVLink", "PCI Express"),
        },
    )


_BRIDGED = "by analogy with links of V100, which have no switch either; not measured"


def _bridge(gigabytes: float, title: str) -> Link:
    """What joins two boards, by what its source prints for both ways together."""
    return Link(
        bandwidth=gigabytes / 2 * GB,
        latency_seconds=3.4e-6,
        efficiency=NVLINK_V100.efficiency,
        sources={
            "bandwidth": f"{title}: {gigabytes:g} GB/s both ways",
            "efficiency": _BRIDGED,
            "latency_seconds": _STEP,
        },
    )


_AMPERE = "NVIDIA GA102 architecture paper and data sheets of A6000 and A40, four links of NVLink 3"
_TURING = "NVIDIA Turing architecture paper, two links of NVLink 2"
BRIDGES: Mapping[str, Link] = MappingProxyType(
    {
        **dict.fromkeys(("RTX-3090", "A6000", "A40"), _bridge(112.5, _AMPERE)),
        **dict.fromkeys(("Titan-RTX", "RTX-8000", "RTX-2080Ti"), _bridge(100.0, _TURING)),
        "A30": _bridge(200.0, "NVIDIA A30 data sheet"),
        **dict.fromkeys(("A100-80GB-PCIe", "A100-40GB-PCIe"), _bridge(600.0, "NVIDIA A100 PCIe data sheet")),
        "A800-80GB-PCIe": _bridge(400.0, "NVIDIA A800 PCIe data sheet"),
        "H100-PCIe": _bridge(600.0, "NVIDIA H100 PCIe data sheet"),
        "H100-NVL": _bridge(600.0, "NVIDIA H100 NVL data sheet"),
        "H200-NVL": _bridge(900.0, "NVIDIA H200 NVL data sheet"),
    }
)


def network(
    *,
    gigabits: float,
    title: str,
    latency_us: float = 14.0,
    efficiency: float = 0.875,
    step: str = _FAR_STEP,
    share: str = _SHARE,
) -> Link:
    """One adapter of `gigabits` each way."""
    return Link(
        bandwidth=gigabits / 8 * GB,
        latency_seconds=latency_us * 1e-6,
        efficiency=efficiency,
        sources={
            "bandwidth": title,
            "efficiency": share,
            "latency_seconds": step,
        },
    )


HDR = network(gigabits=200, title="InfiniBand HDR, 200 Gb/s an adapter")
NDR = network(gigabits=400, title="InfiniBand NDR, 400 Gb/s an adapter")
XDR = network(gigabits=800, title="InfiniBand XDR, 800 Gb/s an adapter (ConnectX-8: NVIDIA GB300 NVL72 data sheet)")
SLINGSHOT = network(gigabits=200, title="Slingshot 11, 200 Gb/s an adapter (2312.12705: 25 GB/s)")


def omni_path(*, gigabits: float, title: str) -> Link:
    """One adapter of Omni-Path, whose transport the host's cores drive and for which NCCL has none of its own."""
    measured = "all-reduces of 4 GB with NCCL among four nodes of four V100 reach 84.7 of 400 Gb/s, of eight A100 40.5"
    share = f"{measured} (bigscience-workshop/bigscience experiments/bandwidth): the better of the two"
    return network(gigabits=gigabits, title=title, efficiency=0.21, share=share)


def ethernet(*, gigabits: float, title: str, host_gigabits: float | None = None) -> Link:
    """One adapter of Ethernet without remote memory access; `host_gigabits` of all that a host has, where several."""
    reached = max(_LEAST_SHARE, 1.0 / (1.0 / _PAYLOAD + (host_gigabits or gigabits) / _COPIED_GIGABITS))
    return network(
        gigabits=gigabits, title=title, latency_us=30.0, efficiency=reached, step=_SOCKETS, share=_SOCKET_SHARE
    )


CLOUD = ethernet(gigabits=100, title="cloud network, 100 Gb/s a node")


def ici(*, gigabytes: float, title: str, torus: int, wraps: int) -> Link:
    """The torus between TPUs: what one has each way over all its links together; sides of `wraps` chips are rings."""
    book = "How to Scale Your Model (jax-ml.github.io/scaling-book)"
    return Link(
        bandwidth=gigabytes * GB,
        latency_seconds=1e-6,
        efficiency=0.9,
        torus=torus,
        wraps=wraps,
        sources={
            "bandwidth": title,
            "efficiency": f"{book}: 45 and 90 GB/s a link each way of 50 and 100",
            "latency_seconds": f"{book}: about a microsecond a hop",
            "torus": title,
            "wraps": f"{book}: sides of sixteen in two dims, of four in three",
        },
    )
