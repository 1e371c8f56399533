"""What it costs to keep state or activations in the host's memory: the link to it, and its processors' optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.layouts import Kind
from meshwright.cost.states import StateBytes
from meshwright.cost.table import OFFLOADS, BoolArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import Link, NodeGroup
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.model import Layer
from meshwright.spec.plan import Offload

_OPTIMIZER = OFFLOADS.index(Offload.OPTIMIZER)
_ACTIVATIONS = OFFLOADS.index(Offload.ACTIVATIONS)
_PARAMETERS = OFFLOADS.index(Offload.PARAMETERS)
_GATHERS = 2.0  # of a shard in a microbatch: for its forward and for its backward
# What a step of the optimizer streams of the memory's peak: 10 billion parameters of 28 bytes in 2.57 s by two Xeon
# 8168 with six channels of DDR4-2666 each (CPU-Adam, the best of hosts: 2101.06840, table 4; 0.43 to 0.5 of 256 GB/s
# in smaller models).
_STEPPED = 0.43


def keeps_away(kind: Kind, table: PlanTable) -> BoolArray:
    """Rows whose plan keeps this block's activations in the host's memory: only layers'."""
    if not isinstance(kind.block, Layer):
        return np.zeros(len(table), dtype=np.bool_)
    return table.offload == _ACTIVATIONS if kind.offload is None else np.full(len(table), kind.offload == _ACTIVATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Seconds to copy what a block keeps over the host link, hidden or not; shape (rows,).

    The device's own lanes are busy for `lanes` of them, whoever else copies, and its memory for `memory`.
    """

    seconds: FloatArray
    lanes: FloatArray
    memory: FloatArray


def carried(moved: FloatArray, table: PlanTable, *, group: NodeGroup) -> Copies:
    """Of `moved` bytes of a block, where there are any; raises ConfigError where the host link is not known."""
    if not moved.any():
        return Copies(**dict.fromkeys(("seconds", "lanes", "memory"), np.zeros(len(moved))))
    link, device = host_link(group), group.device
    return Copies(
        seconds=np.where(moved > 0.0, link.latency_seconds + moved / host_rate(beside(table, group), group=group), 0.0),
        lanes=moved / (link.bandwidth * link.efficiency),
        memory=moved / (device.memory_bandwidth * device.memory_fraction),
    )


def beside(table: PlanTable, group: NodeGroup) -> FloatArray:
    """Devices of a node of `group` that the plan has ranks on, shape (rows,): a plan of fewer ranks than a node has
    devices leaves the others idle, and their share of the host to its own."""
    return np.minimum(table.world, group.devices_per_node).astype(np.float64)


def host_rate(devices: FloatArray, *, group: NodeGroup) -> FloatArray:
    """Bytes/s each way between a device and its host's memory while so many `devices` of the node copy.

    Devices under one switch share its way up, and all of a node the memory that they read or write (2104.07857,
    section 3: 3 GB/s for each of 16 devices of a DGX-2).
    """
    link = host_link(group)
    own = link.bandwidth * link.efficiency / np.minimum(link.oversubscription, devices)
    return np.asarray(own if group.host_bandwidth is None else np.minimum(own, group.host_bandwidth / devices))


def away_seconds(
    owned: FloatArray, table: PlanTable, *, sizes: StateBytes, group: NodeGroup, passed: float
) -> FloatArray:
    """Seconds of an optimizer in the host's memory, shape (rows, ranks): gradients there, its step, parameters back.

    ZeRO-Offload (2101.06840). Where parameters are there too, shards come for forward and for backward of every
    microbatch and their gradients go, as masters are kept, and none of it hides behind work. The processors stream the
    `passed` bytes a parameter of a step at what they reach of the share of the host's memory bandwidth that each device
    of the node has, or at that of the link where it is not known.
    """
    devices = beside(table, group)
    wire = host_rate(devices, group=group)
    share = wire if group.host_bandwidth is None else _STEPPED * group.host_bandwidth / devices
    each = np.where(
        keeps_parameters_away(table),
        table.microbatches * (_GATHERS + 1.0) * sizes.master,
        sizes.reduced + sizes.compute,
    )
    return np.asarray(owned * (each / wire + passed / share)[:, None])


def optimizes_away(table: PlanTable) -> BoolArray:
    """Rows whose plan keeps the optimizer's state in the host's memory."""
    return np.asarray((table.offload == _OPTIMIZER) | keeps_parameters_away(table), dtype=np.bool_)


def keeps_parameters_away(table: PlanTable) -> BoolArray:
    """Rows whose plan keeps shards of parameters, and all that is made of them, in the host's memory."""
    return np.asarray(table.offload == _PARAMETERS, dtype=np.bool_)


def host_link(group: NodeGroup) -> Link:
    """The link to the host's memory; raises ConfigError where nothing is known of it."""
    if group.host is None:
        raise ConfigError(
            Problem(
                what=f"nothing is known of the link from {group.name} to its host's memory",
                where="cluster.groups.host",
                fix="give its bandwidth and latency, or offload nothing",
            )
        )
    return group.host


def host_room(table: PlanTable, group: NodeGroup) -> FloatArray:
    """A device's share of its host's memory in bytes, shape (rows, 1); a host whose memory is not known has no end."""
    devices = beside(table, group)[:, None]
    return np.full_like(devices, np.inf) if group.host_bytes is None else group.host_bytes / devices
