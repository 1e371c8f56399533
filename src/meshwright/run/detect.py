"""detect: this machine as a ClusterSpec: its processor shared by workers, or its accelerators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from meshwright import catalog
from meshwright.catalog.device_names import known_device
from meshwright.catalog.nodes import group_of
from meshwright.run.machine import Machine, cache_root, installed, this_machine
from meshwright.spec.cluster import ClusterSpec, DeviceKind, DeviceSpec, Link, NodeGroup, Precision
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, Problem

_PART = re.compile(r"\bmig\b|laptop|max-q", re.IGNORECASE)  # of a device, or one of another power


def detect(*, devices: int | None = None) -> ClusterSpec:
    """This machine, with `devices` workers: its accelerators when torch sees any, else its processor.

    A processor has one worker a core unless `devices` says otherwise; more workers than cores share them. When this
    machine was measured before, the measured figures are used. Other nodes of a job are not guessed. Raises
    EnvironmentUnfit when `devices` asks for more accelerators than there are.
    """
    if devices is not None and devices < 1:
        raise ConfigError(Problem(what=f"{devices} devices", where="devices", fix="ask for at least one"))
    machine = this_machine()
    names = accelerator_names()
    if names:
        return _accelerators(machine, names, devices)
    return catalog.load_cluster("local" if devices is None else f"local:{devices}", cache=cache_root())


def accelerator_names() -> tuple[str, ...]:
    """What torch calls each accelerator it sees, in order; () without any, or where torch is built for processors."""
    if installed("torch").endswith("+cpu"):
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def uncalibrated(machine: Machine, *, devices: int | None = None) -> ClusterSpec:
    """The machine's processor with the catalog's default figures for its kind."""
    cluster = catalog.local_cluster(
        cores=machine.cores,
        memory_bytes=machine.memory_bytes,
        devices=devices or machine.cores,
        name="local",
        bf16_speed=machine.bf16_speed,
    )
    group = cluster.groups[0]
    sources = dict(group.device.sources) | {f"detected {key}": value for key, value in machine.sources.items()}
    device = replace(group.device, name=machine.processor, sources=sources)
    return replace(cluster, groups=(replace(group, device=device),))


def calibration_file() -> Path:
    """Where what was measured on a machine like this one is kept."""
    return catalog.calibration_path(cache_root(), this_machine().fingerprint)


def _accelerators(machine: Machine, names: tuple[str, ...], devices: int | None) -> ClusterSpec:
    count = devices or len(names)
    if count > len(names):
        raise EnvironmentUnfit(
            Problem(
                what=f"{count} accelerators asked for, {len(names)} seen",
                where="devices",
                fix=f"ask for at most {len(names)}, or hide them (CUDA_VISIBLE_DEVICES=) to use the processor",
            )
        )
    if unlike := set(names[:count]) - {names[0]}:
        kinds = f"{names[0]} and {', '.join(sorted(unlike))}"
        fix = "hide some (CUDA_VISIBLE_DEVICES=), or ask for the first ones alone"
        raise EnvironmentUnfit(Problem(what=f"unlike accelerators in one machine: {kinds}", where="devices", fix=fix))
    device, inside = _preset(names[0]) or _unknown(names[0])
    sources = dict(device.sources) | {"name": f"torch calls it {names[0]}"}
    device = replace(device, memory_bytes=_accelerator_memory() or device.memory_bytes, sources=sources)
    nic = Link(bandwidth=1.25e9, latency_seconds=50e-6, sources={"bandwidth": "assumed: 10 Gbit/s Ethernet"})
    group = NodeGroup(
        name="local", device=device, num_nodes=1, devices_per_node=count, inside=inside, nic=nic, cores=None
    )
    return ClusterSpec(
        name="local", groups=(group,), source=f"detected: {count} x {names[0]} beside {machine.processor}"
    )


def _preset(name: str) -> tuple[DeviceSpec, Link] | None:
    """The catalog's device and in-node link for what torch calls it; None when it knows none."""
    device = None if _PART.search(name) else known_device(name)
    return None if device is None else (device, group_of(device.name, nodes_count=1).inside)


def _unknown(name: str) -> tuple[DeviceSpec, Link]:
    """An accelerator of which nothing is known but its name: figures that measurement must replace; no peak, no MFU."""
    link = Link(bandwidth=20e9, latency_seconds=5e-6, sources={"bandwidth": "guessed: PCIe 4.0 x16"})
    peaks: Mapping[Precision, float] = {}
    device = DeviceSpec(
        name=name,
        kind=DeviceKind.CUDA,
        memory_bytes=16 * 2**30,
        memory_bandwidth=500e9,
        peak_flops=peaks,
        matrix={},
        sources={"all": "guessed; run `meshwright cluster measure`"},
    )
    return device, link


def _accelerator_memory() -> float | None:
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None
