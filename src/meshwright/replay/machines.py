"""The cluster that a published run names: its device and nodes by name, its network where a number is printed."""

from __future__ import annotations

import re
from dataclasses import replace

from meshwright.catalog.devices import find_device
from meshwright.catalog.nodes import group_of
from meshwright.replay.runs import Run
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, NodeGroup

_MEMORY_DIFFERS = 0.15


def cluster(run: Run) -> ClusterSpec | str:
    """The machines of `run`; why not, where its device is not known."""
    device = known_device(run.text("gpu"))
    if device is None:
        return f"no figures of the device {run.text('gpu') or '(blank)'}"
    devices, per_node = run.whole("n_gpus"), run.whole("gpus_per_node")
    if not devices:
        return "the number of devices is not printed"
    group = group_of(device.name, nodes_count=1, per_node=per_node)
    nodes = -(-devices // group.devices_per_node)
    group = _network(run, replace(group, num_nodes=nodes, device=_memory(run, group.device)))
    return ClusterSpec(name=run.text("gpu"), groups=(group,), source=run.text("source_ref"))


def known_device(name: str) -> DeviceSpec | None:
    """The device that begins `name`: what a source writes after it (a form factor, a site) is not read."""
    words = re.split(r"[\s(]+", name.strip())
    parts = [part for word in words for part in word.split("-") if part]
    for count in range(len(parts), 0, -1):
        found = find_device("-".join(parts[:count]))
        if found is not None:
            return found
    return None


def _memory(run: Run, device: DeviceSpec) -> DeviceSpec:
    """The device with the printed memory where that is plainly another size."""
    printed = run.number("gpu_mem_gb")
    if printed is None or abs(printed * 2**30 / device.memory_bytes - 1.0) < _MEMORY_DIFFERS:
        return device
    return replace(device, memory_bytes=printed * 2**30)


def node_gigabits(link: str, devices: int) -> float | None:
    """Gb/s of a node as `link` writes them: "8x200Gb/s", "400Gb/s per GPU", or one rate, which is the node's."""
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*Gb(?:it)?(?:/s)?\b(\s*per GPU)?", link)
    if found is None:
        return None
    count = float(found[1] or (devices if found[3] else 1))
    return count * float(found[2])


def _network(run: Run, group: NodeGroup) -> NodeGroup:
    gigabits = run.number("inter_gbit_per_node") or node_gigabits(run.text("inter_link"), group.devices_per_node)
    if not gigabits:
        return group
    nic = replace(group.nic, bandwidth=gigabits * 1e9 / 8 / group.nics)
    return replace(group, nic=nic)
