"""What the planner chooses over links of several rates, beside every other way as the lab measures them: seconds of a
step, and time to a loss where curves of `run.py` are there. Two hosts of a lab, even and uneven; root is needed.

The device is measured with one core (`cluster measure` in a process that may use no other) while another process
multiplies on the other, as the other host does; links are those of the lab. A machine that is shared has fast and slow
minutes: fixed work on both cores is timed beside each way, its step is predicted for cores as slow as they are then,
and ways are compared as they would be on cores as they were measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import record
from meshwright import catalog, cost, search
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, Link
from meshwright.spec.compression import PowerSgd
from meshwright.spec.errors import ConfigError, NoPlanFits
from meshwright.spec.job import Constraints
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import SynchronizeSpec, SyncKind
from run import FREE, ROOT, WARM, Curve, design, run

MBIT = 1e6 / 8
KINDS = (SyncKind.EAGER, SyncKind.STREAMING, SyncKind.DILOCO)
WAYS: Mapping[str, Mapping[str, int | str]] = {
    "every step": {"sync": "every_step", "replicate": 2},
    "one host": {"devices": 1},
    "two stages": {"pipeline": 2},
    "powersgd": {"sync": "powersgd"},
    **{kind.value: {"sync": kind.value} for kind in KINDS},
}
MOST_STEPS, LEAST_STEPS, LEAST_ROUNDS = 60, 10, 3
HOST_SECONDS = (
    "launch_seconds",
    "layer_seconds",
    "tensor_layer_seconds",
    "context_layer_seconds",
    "shard_layer_seconds",
    "action_seconds",
    "step_overhead_seconds",
)
BESIDE = "import torch; x = torch.ones(512, 512)\nwhile True: x @ x"
FIXED = """import time, torch
torch.set_num_threads(1)
x, y = torch.ones(512, 512), torch.ones(8 * 2**20)
for turn in range(2):
    start = time.perf_counter()
    for _ in range(400):
        x @ x
    for _ in range(60):
        y.add_(1.0)
print(time.perf_counter() - start)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Two hosts with `shares` of both cores, joined by links of `rate` bytes/s."""

    name: str
    rate: float
    shares: tuple[float, float] = (0.5, 0.5)


PLACES = (
    Place(name="25 Mbit/s", rate=25 * MBIT),
    Place(name="100 Mbit/s", rate=100 * MBIT),
    Place(name="1 Gbit/s", rate=1000 * MBIT),
    Place(name="loopback", rate=FREE),
    Place(name="100 Mbit/s, half a core there", rate=100 * MBIT, shares=(0.5, 0.25)),
    Place(name="1 Gbit/s, half a core there", rate=1000 * MBIT, shares=(0.5, 0.25)),
)


def fixed_seconds() -> float:
    """What fixed work takes now on both cores at once, of products and of memory."""
    processes = [subprocess.Popen([sys.executable, "-c", FIXED], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return sum(float(process.communicate()[0]) for process in processes) / len(processes)


def measured_device(path: Path) -> tuple[ClusterSpec, float]:
    """One core of this machine as `meshwright cluster measure` finds it, and what fixed work took around that."""
    beside = path.with_name("fixed-seconds.json")
    if not (path.is_file() and beside.is_file()):
        before = fixed_seconds()
        command = [sys.executable, "-m", "meshwright", "cluster", "measure", "--devices", "1", "--out", str(path)]
        environment = {**os.environ, "MESHWRIGHT_CACHE": str(path.parent / "cache")}
        with subprocess.Popen(["taskset", "-c", "1", sys.executable, "-c", BESIDE]) as other:
            try:
                subprocess.run(["taskset", "-c", "0", *command], check=True, env=environment)
            finally:
                other.kill()
        beside.write_text(json.dumps((before + fixed_seconds()) / 2.0))
    return catalog.load_cluster(str(path)), float(json.loads(beside.read_text()))


def cluster_of(place: Place, one: ClusterSpec) -> ClusterSpec:
    """The two hosts: one core each, or less where a host has a smaller share."""
    link = Link(bandwidth=place.rate, latency_seconds=1e-4, efficiency=0.95 if place.rate < FREE else 0.6)
    base = replace(one.groups[0], num_nodes=1, nic=link)
    if place.shares[0] == place.shares[1]:
        return replace(one, name=place.name, groups=(replace(base, num_nodes=2),))
    slow = slowed(base.device, place.shares[0] / place.shares[1], name="slow")
    return replace(one, name=place.name, groups=(base, replace(base, name="slow", device=slow)))


def slowed(device: DeviceSpec, times: float, *, name: str) -> DeviceSpec:
    """The same that takes so many times as long for all that it does."""
    host = {each: times * getattr(device, each) for each in HOST_SECONDS}
    return replace(
        device,
        name=name,
        peak_flops={kind: each / times for kind, each in device.peak_flops.items()},
        memory_bandwidth=device.memory_bandwidth / times,
        optimizer_bandwidth=(device.optimizer_bandwidth or device.memory_bandwidth) / times,
        attention_rates=tuple(
            replace(each, forward_flops=each.forward_flops / times, backward_flops=each.backward_flops / times)
            for each in device.attention_rates
        ),
        **host,
    )


def predicted_on(made: Design, times: float) -> float:
    """The predicted step of the design on cores that are so many times as slow as when they were measured."""
    groups = tuple(
        replace(group, device=slowed(group.device, times, name=group.device.name)) for group in made.cluster.groups
    )
    return cost.predict(replace(made, cluster=replace(made.cluster, groups=groups))).step_seconds


def asked(place: Place, one: ClusterSpec, fix: Mapping[str, int | str]) -> tuple[Design, float] | None:
    """The planner's design under `fix` with every way of meeting allowed, and its predicted step; None without one."""
    base = design(2, steps=MOST_STEPS, seed=0, every=0)
    kinds = SynchronizeSpec(kinds=KINDS, compressions=(PowerSgd(),))
    job = replace(base.job, synchronize=kinds, constraints=Constraints(fix=dict(fix), devices="any"))
    try:
        decision = search.design(base.model, cluster_of(place, one), job, trainable=True)
    except (NoPlanFits, ConfigError) as error:
        print(f"{place.name}, {dict(fix) or 'free'}: {error}", flush=True)
        return None
    return decision.design, decision.report.step_seconds


def steps_of(made: Design) -> int:
    """As many steps as show whole rounds of its learners, and a few where it has none."""
    every = made.plan.gradients.rounds.every if made.plan.learners > 1 else 1
    rounds = max(LEAST_ROUNDS, math.ceil(LEAST_STEPS / every))
    return WARM + every * max(1, min(rounds, MOST_STEPS // every))


def step_of(made: Design, place: Place, *, folder: Path) -> Curve:
    """The design trained for a few steps where it is to run."""
    job = replace(made.job, total_tokens=steps_of(made) * made.plan.batch_tokens)
    shares = place.shares if made.plan.world_size == 2 else place.shares[:1]
    return run(replace(made, job=job), rate=place.rate, folder=folder, shares=shares)


def tokens_to(loss: float, curve: Mapping[float, float]) -> float:
    """Steps after which a curve of validation loss by step reaches `loss`; infinite where it does not."""
    known = sorted((float(step), value) for step, value in curve.items())
    for (s0, l0), (s1, l1) in pairwise(known):
        if l1 <= loss <= l0:
            return s0 + (s1 - s0) * (l0 - loss) / max(l0 - l1, 1e-12)
    return math.inf


def curves() -> dict[str, dict[float, float]]:
    """Mean validation loss by step of ways of meeting, from the results of `run.py`; {} where it was not run."""
    path = record.RESULTS / "network-2.json"
    if not path.is_file():
        return {}
    found: dict[str, list[dict[str, float]]] = {}
    for name, entry in json.loads(path.read_text())["raw"]["runs"].items():
        found.setdefault(name.partition(",")[0], []).append(entry["validation"])
    return {
        name: {float(step): sum(each[step] for each in seeds) / len(seeds) for step in seeds[0]}
        for name, seeds in found.items()
    }


def way_named(made: Design) -> str:
    """The entry of WAYS that a design is of."""
    plan = made.plan
    if plan.world_size == 1:
        return "one host"
    if plan.pipeline > 1:
        return "two stages"
    return plan.gradients.word if plan.gradients.word in WAYS else "every step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, nargs="*", default=list(range(len(PLACES))))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-choice")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (one, usual), learned = measured_device(options.folder / "one-core.json"), curves()
    rows: list[record.Row] = []
    raw: dict[str, Any] = {}
    for place in (PLACES[index] for index in options.places):
        chosen = asked(place, one, {})
        assert chosen is not None, f"{place.name}: no plan at all"
        name = way_named(chosen[0])
        designs = {way: made for way, fix in WAYS.items() if (made := asked(place, one, fix)) is not None}
        designs[name] = chosen
        found: dict[str, float] = {}
        before = fixed_seconds()
        for way, (made, predicted) in designs.items():
            curve = step_of(made, place, folder=options.folder / "run")
            after = fixed_seconds()
            times = (before + after) / (2.0 * usual)
            then = predicted_on(made, times)
            found[way] = curve.step_seconds * predicted / then
            told = f"{curve.step_seconds:.3f} s a step, predicted {then:.3f} on cores {times:.2f} times as slow"
            print(f"{place.name}, {way}{' (chosen)' if way == name else ''}: {told}", flush=True)
            raw[f"{place.name}, {way}"] = {
                "predicted": predicted,
                "plan": made.plan.describe(),
                "fixed_seconds": [before, after, usual],
                **asdict(curve),
            }
            before = after
        rows += rows_of(place, found, name=name, predicted=chosen[1], learned=learned)
    record.finish("choice", rows, raw)


def rows_of(
    place: Place, found: Mapping[str, float], *, name: str, predicted: float, learned: Mapping[str, dict[float, float]]
) -> list[record.Row]:
    """The choice against the fastest way, its step against the predicted one, and its time to a loss."""
    best = min(found, key=lambda way: found[way])
    behind, missed = found[name] / found[best] - 1.0, predicted / found[name] - 1.0
    rows = [
        record.Row(
            name=f"{place.name}: step of the choice ({name}) beyond the shortest ({best})",
            target="told",
            measured=f"{100 * behind:.1f} %",
            holds=True,
        ),
        record.Row(
            name=f"{place.name}: predicted step of the choice",
            target="15 %",
            measured=f"{100 * missed:+.1f} %",
            holds=abs(missed) <= 0.15,
        ),
    ]
    same = {"every step": "every_step", "one host": "every_step", "two stages": "every_step"}
    known = {way: learned[same.get(way, way)] for way in found if same.get(way, way) in learned}
    if name not in known:
        return rows
    loss = max(min(curve.values()) for curve in known.values())
    times = {way: found[way] * tokens_to(loss, curve) for way, curve in known.items()}
    late = times[name] / min(times.values()) - 1.0
    first = min(times, key=lambda way: times[way])
    return [
        *rows,
        record.Row(
            name=f"{place.name}: time to a loss of {loss:.2f} beyond the shortest ({first})",
            target="10 %",
            measured=f"{100 * late:.1f} %",
            holds=late <= 0.10,
        ),
    ]


if __name__ == "__main__":
    main()
