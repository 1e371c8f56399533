"""One question asked again with something changed: a cluster or a job altered, the chosen plan priced there, and the
best plan designed there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from meshwright import cost
from meshwright.search import decide
from meshwright.search.decide import Best
from meshwright.search.trainer import Trainer
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, Link, NodeGroup
from meshwright.spec.errors import ConfigError, NoPlanFits, Problem
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design
from meshwright.spec.report import Report

BOUNDLESS = 1e6  # times the memory of a device: as good as no limit

Alter = Callable[[ClusterSpec, float], ClusterSpec]


class Progress(Protocol):
    """Told how much of a question is answered, and what comes `now`."""

    def __call__(self, done: int, total: int, now: str = "") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model, a cluster and a job, and the trainer that plans are held to, None for this one."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    trainer: Trainer | None = None


def silent(done: int, total: int, now: str = "") -> None:
    """Progress that nobody watches."""


def best(asked: Question, *, explained: bool = True, within: float | None = None) -> Best | tuple[Problem, ...]:
    """The best plan, or why there is none, where that is to be `explained`; of those that take no longer than `within`
    seconds, where that is not for the job to say."""
    told = partial(decide.best, trainer=asked.trainer, explained=explained, within=within)
    try:
        return told(asked.model, asked.cluster, asked.job)
    except (NoPlanFits, ConfigError) as error:
        return error.problems


def repriced(chosen: Design, cluster: ClusterSpec) -> Report:
    """What the chosen plan costs on a cluster of the same shape with other figures."""
    return cost.predict(replace(chosen, cluster=cluster))


def carried(before: ClusterSpec, after: ClusterSpec) -> ClusterSpec:
    """`after` with what was measured on `before` moved along with the figures it stands beside.

    Measured collectives, attention and optimizer steps come before the figures of a data sheet: without this, a
    change of such a figure would change nothing on a machine that was measured.
    """
    groups = tuple(_carried_group(old, new) for old, new in zip(before.groups, after.groups, strict=True))
    wide = after.wide_area
    if before.wide_area and wide:
        wide = _carried_link(before.wide_area, wide)
    uplinks = {
        site: _carried_link(before.uplinks[site], link) if site in before.uplinks else link
        for site, link in after.uplinks.items()
    }
    return replace(after, groups=groups, wide_area=wide, uplinks=uplinks)


def _carried_group(old: NodeGroup, new: NodeGroup) -> NodeGroup:
    return replace(
        new,
        device=_carried_device(old.device, new.device),
        inside=_carried_link(old.inside, new.inside),
        nic=_carried_link(old.nic, new.nic),
        rack=_carried_link(old.rack, new.rack) if old.rack and new.rack else new.rack,
    )


def _carried_link(old: Link, new: Link) -> Link:
    faster, later = _ratio(new.bandwidth, old.bandwidth), _ratio(new.latency_seconds, old.latency_seconds)
    if new.fits != old.fits or faster == later == 1.0:
        return new
    fits = (
        replace(fit, bytes_per_second=fit.bytes_per_second * faster, latency_seconds=fit.latency_seconds * later)
        for fit in new.fits
    )
    return replace(new, fits=tuple(fits))


def _carried_device(old: DeviceSpec, new: DeviceSpec) -> DeviceSpec:
    rates = tuple(
        replace(
            rate,
            forward_flops=rate.forward_flops * _ratio(new.peak_flops.get(rate.precision, 0.0), known),
            backward_flops=rate.backward_flops * _ratio(new.peak_flops.get(rate.precision, 0.0), known),
        )
        if (known := old.peak_flops.get(rate.precision))
        else rate
        for rate in new.attention_rates
    )
    optimizer = new.optimizer_bandwidth
    if optimizer and optimizer == old.optimizer_bandwidth:
        optimizer *= _ratio(new.memory_bandwidth, old.memory_bandwidth)
    return replace(new, attention_rates=rates, optimizer_bandwidth=optimizer)


def _ratio(new: float, old: float) -> float:
    return new / old if old and math.isfinite(new / old) else 1.0


def each_group(change: Callable[[NodeGroup], NodeGroup]) -> Callable[[ClusterSpec], ClusterSpec]:
    """The cluster with every group changed, and what was measured carried along."""
    return lambda cluster: carried(cluster, replace(cluster, groups=tuple(change(group) for group in cluster.groups)))


def between_nodes(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Bandwidth of adapters, of racks and between sites times `factor`."""

    def change(group: NodeGroup) -> NodeGroup:
        rack = replace(group.rack, bandwidth=group.rack.bandwidth * factor) if group.rack else None
        return replace(group, nic=replace(group.nic, bandwidth=group.nic.bandwidth * factor), rack=rack)

    changed = each_group(change)(cluster)
    return changed.with_uplinks(lambda link: _carried_link(link, replace(link, bandwidth=link.bandwidth * factor)))


def inside_nodes(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Bandwidth between the devices of a node times `factor`."""
    return each_group(
        lambda group: replace(group, inside=replace(group.inside, bandwidth=group.inside.bandwidth * factor))
    )(cluster)


def latency(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Latency of every link times `factor`."""

    def slower(link: Link) -> Link:
        return replace(link, latency_seconds=link.latency_seconds * factor)

    def change(group: NodeGroup) -> NodeGroup:
        rack = slower(group.rack) if group.rack else None
        return replace(group, inside=slower(group.inside), nic=slower(group.nic), rack=rack)

    return each_group(change)(cluster).with_uplinks(lambda link: _carried_link(link, slower(link)))


def _device(cluster: ClusterSpec, change: Callable[[DeviceSpec], DeviceSpec]) -> ClusterSpec:
    return each_group(lambda group: replace(group, device=change(group.device)))(cluster)


def peak(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Peak of every precision times `factor`."""
    return _device(
        cluster,
        lambda device: replace(device, peak_flops={kind: rate * factor for kind, rate in device.peak_flops.items()}),
    )


def memory_bandwidth(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Bandwidth of device memory times `factor`."""
    return _device(cluster, lambda device: replace(device, memory_bandwidth=device.memory_bandwidth * factor))


def memory_bytes(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Memory of every device times `factor`."""
    return _device(cluster, lambda device: replace(device, memory_bytes=device.memory_bytes * factor))
