"""What a run comes to with its failures: the useful share of its time, when to save, days, dollars and energy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwright.cost.optimizers import mean_moments
from meshwright.cost.states import state_bytes
from meshwright.cost.table import IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, NodeGroup
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import Moments
from meshwright.spec.outlook import Outlook

# Where the cluster names no storage: 2407.21783, section 3.3.1, 2 TB/s sustained behind 16,384 devices.
STORAGE_BYTES_PER_SECOND = 2e12 / 16384
# What PCI Express 4.0 of 16 lanes sustains of its 31.5 GB/s, where a node's host link is not known.
HOST_BYTES_PER_SECOND = 25e9
# One message between two ranks over sockets, as of the catalog's Ethernet.
_MESSAGE_SECONDS = 30e-6
# Sizes, then values: what gathers objects of all ranks, each of them a turn around a ring (train/checkpoint/peers.py).
_TURNS = 2
# MegaScale, 2402.15627: failures are found and diagnosed in less than ten minutes on average.
RESTART_SECONDS = 600.0
# 2211.02001: what the building that trained BLOOM draws for a watt of its machines.
POWER_USAGE_EFFECTIVENESS = 1.2
_LEAST_GOODPUT = 1e-12  # of machines that fail before anything is done: a run as good as without end


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How a run saves: seconds of work between checkpoints, and the share of the time that leads to the target."""

    every_seconds: float
    goodput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of all devices of a plan together, shape (rows,); not a number where a device in use does not tell."""

    dollars_per_hour: FloatArray
    watts: FloatArray
    failures_per_hour: FloatArray


def rates(world: IntArray, cluster: ClusterSpec) -> Rates:
    """Money, power and failures of the first `world` devices of `cluster`; power is of the devices alone."""

    def added(each: list[float | None]) -> FloatArray:
        total, before = np.zeros(len(world)), 0
        for group, value in zip(cluster.groups, each, strict=True):
            taken = np.clip(world - before, 0, group.num_devices)
            total = total + np.where(taken > 0, taken * (math.nan if value is None else value), 0.0)
            before += group.num_devices
        return total

    devices = [group.device for group in cluster.groups]
    return Rates(
        dollars_per_hour=added([device.price_per_hour for device in devices]),
        watts=added([device.watts for device in devices]),
        failures_per_hour=added([_failures(device) for device in devices]),
    )


def outlook(table: PlanTable, *, step_seconds: float, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> Outlook:
    """What the one plan in `table` comes to when it trains `job.total_tokens`."""
    assert len(table) == 1, "an outlook is of one plan"
    world, found = int(table.world[0]), rates(table.world, cluster)
    dollars, watts, failures = (
        None if math.isnan(values[0]) else float(values[0])
        for values in (found.dollars_per_hour, found.watts, found.failures_per_hour)
    )
    sizes = state_bytes(table.of_job(job))
    # Moments of one byte are saved as what they stand for, which any plan can read.
    moment = 2.0 if getattr(job.optimizer, "state", Moments.FP32) is Moments.BF16 else float(sizes.wide[0])
    each = float(sizes.master[0]) + mean_moments(model, job.optimizer) * moment
    size = model.parameters * each
    stored = size / (cluster.storage_bandwidth or world * STORAGE_BYTES_PER_SECOND)
    copied, agreed = max(_copy_seconds(size / world, group) for group in cluster.groups), agreed_seconds(world)
    write = max(stored, copied) + agreed
    stall = copied + agreed if job.checkpoint.asynchronous else write
    restart = RESTART_SECONDS + stored
    saving = None
    if failures:
        saving = save(
            step_seconds=step_seconds,
            stall_seconds=stall,
            write_seconds=write,
            restart_seconds=restart,
            seconds_between_failures=3600.0 / failures,
            every_steps=job.checkpoint.every_steps,
        )
    useful = max(saving.goodput, _LEAST_GOODPUT) if saving else 1.0
    hours = job.total_tokens / job.batch_tokens * step_seconds / 3600.0 / useful
    return Outlook(
        tokens=job.total_tokens,
        days=hours / 24.0,
        goodput=saving.goodput if saving else None,
        hours_between_failures=1.0 / failures if failures else None,
        failures=hours * failures if failures else None,
        checkpoint_bytes=size,
        checkpoint_seconds=saving.every_seconds if saving else None,
        stall_seconds=stall,
        write_seconds=write,
        restart_seconds=restart,
        dollars=None if dollars is None else hours * dollars,
        kilowatt_hours=None if watts is None else hours * watts * POWER_USAGE_EFFECTIVENESS / 1000.0,
        assumed=_assumed(failures=bool(failures), watts=watts is not None, storage=cluster.storage_bandwidth),
    )


def agreed_seconds(world: int) -> float:
    """Until every one of `world` ranks knows what a save took on all others: training waits for it."""
    return _TURNS * (world - 1) * _MESSAGE_SECONDS


def _copy_seconds(size: float, group: NodeGroup) -> float:
    """To copy `size` bytes of every device to the memory of its host, which the devices of a node write together."""
    if group.host is None:
        return size / HOST_BYTES_PER_SECOND
    link = group.host
    rate = link.bandwidth * link.efficiency
    if group.host_bandwidth is not None:
        rate = min(rate, group.host_bandwidth / group.devices_per_node)
    return link.latency_seconds + size / rate


def save(
    *,
    step_seconds: float,
    stall_seconds: float,
    write_seconds: float,
    restart_seconds: float,
    seconds_between_failures: float,
    every_steps: int = 0,
) -> Saving:
    """When to save and what that leaves, in whole steps; `every_steps` above 0 is kept as the job says.

    The interval is Daly's (2006, doi 10.1016/j.future.2004.11.016, equation 37), whose first term is Young's (1974),
    and never less than it takes to write; the time to the target is his complete model, with failures that come at
    random, in restarts too. Work since the last checkpoint that was safe is done again. One that is asked for before
    the last is written waits for it.
    """
    stall, mean = max(stall_seconds, 1e-9), seconds_between_failures
    again = restart_seconds + max(0.0, write_seconds - stall_seconds)

    def saving(steps: int) -> Saving:
        every = steps * step_seconds
        stopped = max(stall, write_seconds - every)
        grown = math.exp(min(again / mean, 700.0)) * math.expm1(min((every + stopped) / mean, 700.0))
        return Saving(every_seconds=every, goodput=every / (mean * grown))

    if every_steps:
        return saving(every_steps)
    best = _optimum(stall, mean) / step_seconds
    least = max(1, math.ceil(write_seconds / step_seconds))
    return max(
        (saving(max(least, steps)) for steps in (math.floor(best), math.ceil(best))), key=lambda one: one.goodput
    )


def _optimum(stall: float, mean: float) -> float:
    """Seconds of work between checkpoints of `stall` seconds where failures are `mean` seconds apart."""
    ratio = stall / (2.0 * mean)
    return (
        mean if ratio >= 1.0 else math.sqrt(2.0 * stall * mean) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall
    )


def _failures(device: DeviceSpec) -> float | None:
    """Of one device, an hour."""
    return None if device.hours_between_failures is None else 1.0 / device.hours_between_failures


def _assumed(*, failures: bool, watts: bool, storage: float | None) -> tuple[str, ...]:
    told = []
    if failures:
        each = f"{STORAGE_BYTES_PER_SECOND / 1e6:.0f} MB/s a device, as the cluster names none"
        rate = each if storage is None else f"{storage / 1e9:,.4g} GB/s, as the cluster says"
        told.append(f"storage takes {rate}; a restart takes {RESTART_SECONDS / 60.0:.0f} min and a read")
    else:
        told.append("no failure rate of these devices is known: failures are not counted")
    if watts:
        told.append(f"devices at their rated power, times {POWER_USAGE_EFFECTIVENESS} for the building")
    return tuple(told)
