"""measure: short real measurements of this machine, made into a ClusterSpec whose sources say when and with what."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from meshwright.catalog.local import with_devices
from meshwright.run.calibrate import Observation, calibrate
from meshwright.run.children import in_child, in_children
from meshwright.run.detect import accelerator_names, calibration_file, detect, uncalibrated
from meshwright.run.figures import Measured, with_measurements
from meshwright.run.machine import Machine, this_machine
from meshwright.run.measure_device import DeviceTimes, measure_device
from meshwright.run.measure_layers import measure_scaling
from meshwright.run.measure_network import NetworkTimes, measure_network
from meshwright.run.measure_steps import measure_steps, probe_designs
from meshwright.spec import codec
from meshwright.spec.cluster import ClusterSpec, DeviceKind, NodeGroup, Precision
from meshwright.spec.errors import EnvironmentUnfit, Problem, WorkerFailed
from meshwright.spec.units import format_percent

Progress = Callable[[str], None]
# What a child may take beside its own budget: start, imports, one call of every measurement.
_CHILD_SLACK_SECONDS = 90.0
# What processes take to start and import, all of them together; and the least for the measurements themselves.
_STARTING_SECONDS, _LEAST_SECONDS = 45.0, 5.0
_STEP_RANKS = (1, 2, 4)


def measure(
    cluster: ClusterSpec | None = None, *, seconds_budget: float = 90.0, progress: Progress | None = None
) -> ClusterSpec:
    """This machine with measured figures, kept in the cache under its fingerprint; takes about `seconds_budget`.

    `cluster` says how many workers there are; None detects them. Figures come from fresh processes, each the lower
    quartile of many repeats. Raises WorkerFailed when a child cannot measure.
    """
    say = progress or _quiet
    machine = this_machine()
    on_accelerator = bool(accelerator_names())
    base = cluster or (detect() if on_accelerator else uncalibrated(machine))
    spare = max(seconds_budget - _STARTING_SECONDS, _LEAST_SECONDS)
    measured = run_measurements(base, machine=machine, seconds_budget=0.5 * spare, progress=say)
    stamp = f"measured on {datetime.now(UTC):%Y-%m-%d} by meshwright cluster measure, torch {machine.torch_version}"
    result = with_measurements(base, measured, stamp=stamp)
    if not on_accelerator:
        result = _explained(result, seconds=0.5 * spare, stamp=stamp, say=say)
    path = calibration_file()
    save_cluster(result, path=path)
    say(f"kept in {path}")
    return result


def run_measurements(base: ClusterSpec, *, machine: Machine, seconds_budget: float, progress: Progress) -> Measured:
    """Runs every child in turn, so that none disturbs another."""
    group = base.groups[0]
    device = "cpu" if group.device.kind is DeviceKind.CPU else "cuda"
    precisions = (Precision.FP32, Precision.BF16)
    budget = {"threads": 1, "precisions": precisions, "device": device}
    progress("one worker: products, attention, copies, layers, optimizer")
    one: DeviceTimes = in_child(
        measure_device, budget | {"seconds": 0.5 * seconds_budget}, seconds=seconds_budget + _CHILD_SLACK_SECONDS
    )
    gain = 1.0
    if device == "cpu" and machine.cores > 1:
        progress(f"one worker with 1 and with {machine.cores} cores in turn: layers")
        fastest = min(one.layers, key=lambda entry: entry.product_seconds / entry.sequences).precision
        given = {"precision": fastest, "threads": (1, machine.cores), "seconds": 0.12 * seconds_budget}
        alone, all_cores = in_child(measure_scaling, given, seconds=seconds_budget + _CHILD_SLACK_SECONDS)
        gain = alone / all_cores
    network = None
    world = _world(group, device=device)
    if world > 1:
        progress(f"{world} workers: collectives by size and group, and computing together")
        network = _network(world, seconds=0.35 * seconds_budget)
    return Measured(one=one, gain=gain, cores=machine.cores, network=network)


def run_steps(cluster: ClusterSpec, *, seconds: float, progress: Progress) -> list[Observation]:
    """Whole steps of small models on 1, 2 and 4 workers, in fresh processes; a count that fails is left out."""
    found: list[Observation] = []
    for ranks in _STEP_RANKS:
        designs = probe_designs(cluster, ranks=ranks)
        progress(f"whole steps of {len(designs)} plans on {ranks} worker{'s' if ranks > 1 else ''}")
        share = seconds / len(_STEP_RANKS)
        with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
            store = str(Path(folder) / "store")
            given = [
                {"rank": rank, "world": ranks, "store": store, "designs": designs, "seconds": share}
                for rank in range(ranks)
            ]
            try:
                by_rank = in_children(measure_steps, given, seconds=10 * share + _CHILD_SLACK_SECONDS)
            except WorkerFailed as error:
                progress(f"left out: {error}")
                continue
        slowest = [max(seconds) for seconds in zip(*by_rank, strict=True)]
        found += [Observation(design=design, seconds=value) for design, value in zip(designs, slowest, strict=True)]
    return found


def _explained(cluster: ClusterSpec, *, seconds: float, stamp: str, say: Progress) -> ClusterSpec:
    """The cluster with its figures moved until they explain whole steps; as it is when the machine is too busy."""
    devices = cluster.num_devices
    wide = with_devices(cluster, devices=max(devices, *_STEP_RANKS))
    calibration = calibrate(wide, run_steps(wide, seconds=seconds, progress=say), stamp=stamp)
    before, after = (format_percent(math.expm1(error)) for error in (calibration.before, calibration.after))
    if calibration.moved:
        unseen = format_percent(math.expm1(calibration.left_out))
        say(f"whole steps were missed by {before} in the mean and are now missed by {after}; {unseen} when left out")
    else:
        say(f"whole steps are missed by {before} in the mean; figures stay, as these steps do not agree on better ones")
    return with_devices(calibration.cluster, devices=devices)


def save_cluster(cluster: ClusterSpec, *, path: Path) -> None:
    """The file holds the cluster as JSON, whole or not at all; raises EnvironmentUnfit where it cannot be written."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(codec.encode(cluster), indent=1))
        partial.replace(path)
    except OSError as error:
        what = f"what was measured cannot be kept: {error.strerror}"
        fix = "set MESHWRIGHT_CACHE to a folder that can be written"
        raise EnvironmentUnfit(Problem(what=what, where=str(path), fix=fix)) from error


def _world(group: NodeGroup, *, device: str) -> int:
    """How many workers measure the collectives: 4 on a processor, 8 when it has as many workers; all accelerators."""
    if device != "cpu":
        return min(group.devices_per_node, 8)
    return 8 if group.devices_per_node >= 8 else 4


def _network(world: int, *, seconds: float) -> NetworkTimes:
    groups = tuple(size for size in (2, 4, 8) if size <= world)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        store = str(Path(folder) / "store")
        given = [
            {"rank": rank, "world": world, "store": store, "groups": groups, "seconds": seconds}
            for rank in range(world)
        ]
        results = in_children(measure_network, given, seconds=4 * seconds + _CHILD_SLACK_SECONDS)
    first: NetworkTimes = results[0]
    return first


def _quiet(message: str) -> None:
    del message
