"""The machine at hand as a cluster: its worker processes share its cores and talk over loopback."""

from __future__ import annotations

from dataclasses import replace

from meshwright.spec.cluster import (
    ClusterSpec,
    Collective,
    CollectiveFit,
    DeviceKind,
    DeviceSpec,
    Link,
    MatrixCurve,
    NodeGroup,
    Precision,
)
from meshwright.spec.errors import ConfigError, Problem

_MACHINE = "a two-core cloud machine, torch 2.13 on one core; measure yours to replace it"
_RATE = 165e9
_CURVE = MatrixCurve(fraction=1.0, half_m=1.0, half_n=1.0, half_k=1.0)
_MIB16 = 16.0 * 2**20

# (collective, ranks, milliseconds of 4 bytes, milliseconds of 16 MiB), the best of many on that machine.
_GLOO = (
    (Collective.ALL_REDUCE, 2, 0.15, 10.0),
    (Collective.ALL_REDUCE, 4, 0.79, 27.0),
    (Collective.ALL_REDUCE, 8, 4.8, 80.0),
    (Collective.ALL_GATHER, 2, 0.13, 8.4),
    (Collective.ALL_GATHER, 4, 0.88, 22.0),
    (Collective.ALL_GATHER, 8, 4.0, 48.0),
    (Collective.REDUCE_SCATTER, 2, 0.21, 16.0),
    (Collective.REDUCE_SCATTER, 4, 1.0, 41.0),
    (Collective.REDUCE_SCATTER, 8, 3.9, 87.0),
    (Collective.ALL_TO_ALL, 2, 0.06, 3.7),
    (Collective.ALL_TO_ALL, 4, 0.38, 13.0),
    (Collective.ALL_TO_ALL, 8, 2.0, 28.0),
    (Collective.SEND, 2, 0.035, 3.65),
)


def local_cluster(
    *, cores: int, memory_bytes: float, devices: int, name: str = "local", bf16_speed: float = 1.0
) -> ClusterSpec:
    """`devices` worker processes on one node that share its `cores` and its memory, with rates nobody measured here.

    The peak is the fastest product in fp32 seen on a machine of this kind, of one core, and that in bf16 `bf16_speed`
    times as fast. Raises ConfigError when a count is not positive.
    """
    counts = {"cores": cores, "memory_bytes": memory_bytes, "devices": devices}
    problems = [Problem(what=f"{value} is not positive", where=key) for key, value in counts.items() if value <= 0]
    if problems:
        raise ConfigError(problems)
    return ClusterSpec(
        name=name,
        groups=(
            NodeGroup(
                name=name,
                device=_processor_device(cores=cores, memory_bytes=memory_bytes / devices, bf16_speed=bf16_speed),
                num_nodes=1,
                devices_per_node=devices,
                inside=_loopback(),
                nic=_loopback(),
                cores=cores,
            ),
        ),
        source="defaults for a processor; not measured on this machine",
    )


def _processor_device(*, cores: int, memory_bytes: float, bf16_speed: float) -> DeviceSpec:
    precisions = (Precision.FP32, Precision.BF16)
    return DeviceSpec(
        name="cpu",
        kind=DeviceKind.CPU,
        memory_bytes=memory_bytes,
        memory_bandwidth=13.5e9,
        peak_flops={Precision.FP32: _RATE, Precision.BF16: bf16_speed * _RATE},
        matrix=dict.fromkeys(precisions, _CURVE),
        memory_fraction=1.0,
        attention_fraction=0.5,
        attention_backward_fraction=0.4,
        launch_seconds=5e-6,
        reserved_bytes=0.25 * 2**30,
        usable_fraction=0.9,
        optimizer_bandwidth=24.7e9,
        scaling=tuple(count / (1 + 0.03 * (count - 1)) for count in range(1, cores + 1)),
        sources={
            "peak_flops": f"fp32 products of 512 to 2,048 run at 160 to 165 GFLOP/s on {_MACHINE}; those of bf16 "
            f"{bf16_speed:g} times as fast, by what the processor has units for",
            "matrix": f"products of 128 already run at full rate on {_MACHINE}",
            "memory_bandwidth": f"copy at 13.5 GB/s on {_MACHINE}",
            "optimizer_bandwidth": f"fused AdamW of 881 M parameters/s, 28 bytes each, on {_MACHINE}",
            "scaling": "three in a hundred of the work does not spread over cores; not measured",
            "memory_bytes": "an equal share of this machine's memory",
            "launch_seconds": "typical; not measured",
            "usable_fraction": "leaves a tenth to the system and to what allocators lose; not measured",
            "reserved_bytes": "torch imported in one process, about; not measured",
            "attention_fraction": "typical; not measured",
        },
    )


def _loopback() -> Link:
    fits = tuple(
        CollectiveFit(
            operation=operation,
            ranks=ranks,
            latency_seconds=small * 1e-3,
            bytes_per_second=_MIB16 / ((large - small) * 1e-3),
        )
        for operation, ranks, small, large in _GLOO
    )
    return Link(
        bandwidth=4.6e9,
        latency_seconds=35e-6,
        efficiency=0.6,
        fits=fits,
        sources={
            "bandwidth": f"gloo, messages of 16 MiB between two processes of {_MACHINE}",
            "latency_seconds": f"gloo, messages of 4 bytes between two processes of {_MACHINE}",
            "efficiency": "ring all-reduce among two over that bandwidth, about",
            "fits": f"gloo on loopback, 4 bytes and 16 MiB, best of many, 2 to 8 processes of {_MACHINE}",
        },
    )


def with_devices(cluster: ClusterSpec, *, devices: int) -> ClusterSpec:
    """The same machine with another number of worker processes, each with its share of the memory."""
    group = cluster.groups[0]
    memory = group.device.memory_bytes * group.devices_per_node / devices
    device = replace(group.device, memory_bytes=memory)
    return replace(cluster, groups=(replace(group, device=device, devices_per_node=devices),))
