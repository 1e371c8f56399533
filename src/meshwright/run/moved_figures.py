"""The figures of a cluster that measured steps may move, each with how far it may be from where it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.spec.cluster import ClusterSpec, DeviceKind, DeviceSpec, Link, MatrixCurve
from meshwright.spec.report import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a cluster that may be moved: `spread` is the standard deviation of its log around its start.

    `start` replaces a value of zero, which has no log.
    """

    name: str
    read: Callable[[ClusterSpec], float]
    write: Callable[[ClusterSpec, float], ClusterSpec]
    spread: float
    start: float = 0.0


def change_device(cluster: ClusterSpec, change: Callable[[DeviceSpec], DeviceSpec]) -> ClusterSpec:
    group = cluster.groups[0]
    return replace(cluster, groups=(replace(group, device=change(group.device)), *cluster.groups[1:]))


def _field(name: str, *, spread: float, start: float = 0.0) -> Figure:
    """A number of the device by its name."""

    def write(cluster: ClusterSpec, value: float) -> ClusterSpec:
        changes: dict[str, Any] = {name: value}
        return change_device(cluster, lambda device: replace(device, **changes))

    return Figure(name=name, read=_read(name), write=write, spread=spread, start=start)


def _read(name: str) -> Callable[[ClusterSpec], float]:
    return lambda cluster: float(getattr(cluster.groups[0].device, name) or 0.0)


def _memory_fraction(cluster: ClusterSpec, value: float) -> ClusterSpec:
    """The share of the memory bandwidth that steps reach; where it is more than all, the bandwidth is more."""
    return change_device(
        cluster,
        lambda device: replace(
            device, memory_bandwidth=device.memory_bandwidth * max(value, 1.0), memory_fraction=min(value, 1.0)
        ),
    )


def _matrix_fraction(cluster: ClusterSpec, value: float) -> ClusterSpec:
    """Every matrix curve at `value` times the fraction that it was fitted with."""

    def scaled(curve: MatrixCurve) -> MatrixCurve:
        return replace(curve, fraction=curve.fraction * value)

    return change_device(
        cluster,
        lambda device: replace(device, matrix={key: scaled(curve) for key, curve in device.matrix.items()}),
    )


def _attention_rates(cluster: ClusterSpec, value: float) -> ClusterSpec:
    """Attention at `value` times its rates, or its fractions where no rate was measured."""
    return change_device(
        cluster,
        lambda device: (
            replace(
                device,
                attention_rates=tuple(
                    replace(rate, forward_flops=rate.forward_flops * value, backward_flops=rate.backward_flops * value)
                    for rate in device.attention_rates
                ),
            )
            if device.attention_rates
            else replace(
                device,
                attention_fraction=device.attention_fraction * value,
                attention_backward_fraction=device.attention_backward_fraction * value,
                attention_kernels={
                    kernel: replace(share, forward=share.forward * value, backward=share.backward * value)
                    for kernel, share in device.attention_kernels.items()
                },
            )
        ),
    )


def _scaling(cluster: ClusterSpec, value: float) -> ClusterSpec:
    """What several cores give one worker over one core, `value` times as much."""

    def scaled(device: DeviceSpec) -> DeviceSpec:
        return replace(device, scaling=tuple(1.0 + (speed - 1.0) * value for speed in device.scaling))

    return change_device(cluster, scaled)


def _together(cluster: ClusterSpec, value: float) -> ClusterSpec:
    """What several busy cores gain over one, `value` times as much."""
    group = cluster.groups[0]
    known = group.together or tuple(float(count) for count in range(1, (group.cores or 1) + 1))
    together = tuple(1.0 + (speed - 1.0) * value for speed in known)
    return replace(cluster, groups=(replace(group, together=together), *cluster.groups[1:]))


def _link(place: str, *, spread: float, latency: bool = False) -> Figure:
    """The latency or the bandwidth of a link of a node: of what was measured on it where that is known."""

    def change(link: Link, value: float) -> Link:
        slower, faster = (value, 1.0) if latency else (1.0, value)
        fits = tuple(
            replace(fit, latency_seconds=fit.latency_seconds * slower, bytes_per_second=fit.bytes_per_second * faster)
            for fit in link.fits
        )
        return replace(
            link, fits=fits, latency_seconds=link.latency_seconds * slower, bandwidth=link.bandwidth * faster
        )

    def write(cluster: ClusterSpec, value: float) -> ClusterSpec:
        group = cluster.groups[0]
        links: dict[str, Any] = {place: change(getattr(group, place), value)}
        return replace(cluster, groups=(replace(group, **links), *cluster.groups[1:]))

    name = f"{place}.{'latency' if latency else 'bandwidth'}"
    return Figure(name=name, read=lambda _: 1.0, write=write, spread=spread)


_BETWEEN = _link("nic", spread=0.3)
FIGURES: tuple[Figure, ...] = (
    Figure(name="matrix", read=lambda _: 1.0, write=_matrix_fraction, spread=0.05),
    Figure(name="attention_rates", read=lambda _: 1.0, write=_attention_rates, spread=0.05),
    Figure(name="device.scaling", read=lambda _: 1.0, write=_scaling, spread=0.08),
    Figure(name="group.together", read=lambda _: 1.0, write=_together, spread=0.08),
    Figure(name="memory_fraction", read=_read("memory_fraction"), write=_memory_fraction, spread=0.1),
    _field("launch_seconds", spread=0.3),
    _field("layer_seconds", spread=0.5, start=5e-5),
    _field("step_overhead_seconds", spread=1.0, start=1e-3),
    _field("optimizer_bandwidth", spread=0.2),
    _field("tensor_layer_seconds", spread=1.0, start=4e-4),
    _field("context_layer_seconds", spread=1.0, start=4e-4),
    _field("shard_layer_seconds", spread=1.0, start=2e-4),
    _field("action_seconds", spread=1.0, start=2e-4),
    _link("inside", spread=0.3, latency=True),
    _link("inside", spread=0.3),
    _BETWEEN,
)
# What nobody measured alone is off by 0.14 in products of published runs (cost/uncertainty.py), by 0.05 where it was.
_UNMEASURED = 3.0
_NARROW = 0.2


def figures_of(cluster: ClusterSpec) -> tuple[Figure, ...]:
    """Those that steps on `cluster` can tell: nothing between nodes where there is one, of what an accelerator's host
    takes beside kernels nothing where it was not measured, for that is hidden, and none that has no value to move."""
    told = FIGURES if cluster.groups[0].num_nodes > 1 else [figure for figure in FIGURES if figure is not _BETWEEN]
    hidden = cluster.groups[0].device.kind is not DeviceKind.CPU
    return tuple(figure for figure in told if figure.read(cluster) or (figure.start and not hidden))


def spread_of(figure: Figure, cluster: ClusterSpec) -> float:
    """The standard deviation of the log of `figure`, wider where nothing of `cluster` was measured."""
    unmeasured = cluster.origin is Origin.ANALYTIC and figure.spread < _NARROW
    return figure.spread * (_UNMEASURED if unmeasured else 1.0)
