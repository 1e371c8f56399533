"""What the planner chooses over links of several rates, beside every other way as the lab measures them: seconds of a
step, and time to a loss. Two hosts of a lab, even and uneven; root is needed.

The device is measured with one core (`cluster measure` in a process that may use no other) while another process
multiplies on the other, as the other host does; links are what `meshwright lab` measures between the hosts. A machine
that is shared has fast and slow minutes: fixed work on both cores is timed beside each way, its step is predicted for
cores as slow as they are then, and ways are compared as they would be on cores as they were measured. What a way learns
by step does not depend on the link, and is that of the very rounds, in the very precision, that the planner chose for
it in that place (`losses.py`): what is kept of an earlier call, or is measured here. Of places that are not run, what
is kept is told again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import losses

import record
from meshwright import catalog, cost, search
from meshwright.lab.fabric import unfit
from meshwright.lab.lab import Lab
from meshwright.lab.links import measure_pairs
from meshwright.lab.topology import Topology, Uplink
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, Link, Precision
from meshwright.spec.compression import PowerSgd
from meshwright.spec.errors import ConfigError, ExitCode, NoPlanFits
from meshwright.spec.job import Constraints
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import SynchronizeSpec, SyncKind
from run import FREE, ROOT, WARM, Curve, design, in_a_lab, run

MBIT = 1e6 / 8
KINDS = (SyncKind.EAGER, SyncKind.STREAMING, SyncKind.DILOCO)
WAYS: Mapping[str, Mapping[str, int | str]] = {
    "every step": {"sync": "every_step", "replicate": 2},
    "one host": {"devices": 1},
    "two stages": {"pipeline": 2},
    "powersgd": {"sync": "powersgd"},
    **{kind.value: {"sync": kind.value} for kind in KINDS},
}
SENT = Precision.INT4  # by learners, as docs/learners.md recommends
TIMED_SECONDS, LEAST_TIMES = 8.0, 3  # of steps, in whole rounds, so many of them at the least
LONGEST = 96  # steps that are timed at the most
LINK_SECONDS = 1.0  # that a link is measured in
LOSS_AT = 125  # steps of ranks that meet in every step, whose loss is to be reached
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


def measured_link(place: Place) -> Link:
    """What crosses between two hosts of `place`, as `meshwright lab` measures it."""
    names = ("near", "far")
    uplinks = tuple(Uplink(below=name, above="core", bandwidth=place.rate) for name in names)
    with Lab.of(Topology(hosts=names, shares=place.shares, uplinks=uplinks)) as lab:
        (pair,) = measure_pairs(lab, seconds=LINK_SECONDS)
    return Link(bandwidth=pair.bandwidth, latency_seconds=pair.latency_seconds, efficiency=1.0)


def cluster_of(place: Place, one: ClusterSpec, link: Link) -> ClusterSpec:
    """The two hosts on `link`: one core each, or less where a host has a smaller share."""
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


def asked(place: Place, cluster: ClusterSpec, fix: Mapping[str, int | str]) -> tuple[Design, float] | None:
    """The planner's design under `fix` with every way of meeting allowed, and its predicted step; None without one."""
    base = design(2, steps=LONGEST, seed=0, every=0)
    kinds = SynchronizeSpec(kinds=KINDS, precision=SENT, compressions=(PowerSgd(),))
    job = replace(base.job, synchronize=kinds, constraints=Constraints(fix=dict(fix), devices="any"))
    try:
        decision = search.design(base.model, cluster, job, trainable=True)
    except (NoPlanFits, ConfigError) as error:
        print(f"{place.name}, {dict(fix) or 'free'}: {error}", flush=True)
        return None
    return decision.design, decision.report.step_seconds


def steps_of(made: Design, *, predicted: float) -> int:
    """As many steps as take TIMED_SECONDS, in whole rounds of its learners."""
    every = rounds_of(made)
    times = max(LEAST_TIMES, math.ceil(TIMED_SECONDS / (predicted * every)))
    return WARM + every * max(1, min(times, LONGEST // every))


def rounds_of(made: Design) -> int:
    return made.plan.gradients.rounds.every if made.plan.learners > 1 else 1


def step_of(made: Design, place: Place, *, predicted: float, folder: Path) -> Curve:
    """The design trained for a few steps where it is to run."""
    job = replace(made.job, total_tokens=steps_of(made, predicted=predicted) * made.plan.batch_tokens)
    shares = place.shares if made.plan.world_size == 2 else place.shares[:1]
    return run(replace(made, job=job), rate=place.rate, folder=folder, shares=shares)


def usual_step(seconds: Sequence[float], *, every: int) -> float:
    """The median over whole rounds of the mean of a step: what else ran for a moment is of few of them."""
    timed = seconds[WARM:]
    rounds = [statistics.mean(timed[first : first + every]) for first in range(0, len(timed) - every + 1, every)]
    return statistics.median(rounds)


def steps_to(loss: float, curve: Mapping[int, float]) -> float:
    """Steps after which a curve of validation loss by step reaches `loss`; where it does not, all its steps: it needs
    more."""
    for (s0, l0), (s1, l1) in pairwise(sorted(curve.items())):
        if l1 <= loss <= l0:
            return s0 + (s1 - s0) * (l0 - loss) / max(l0 - l1, 1e-12)
    return max(curve)


def way_named(made: Design) -> str:
    """The entry of WAYS that a design is of."""
    plan = made.plan
    if plan.world_size == 1:
        return "one host"
    if plan.pipeline > 1:
        return "two stages"
    return plan.gradients.word if plan.gradients.word in WAYS else "every step"


def measured_in(place: Place, one: ClusterSpec, *, usual: float, folder: Path) -> dict[str, Any]:
    """Every way in `place`, and which of them the planner chose."""
    cluster = cluster_of(place, one, measured_link(place))
    chosen = asked(place, cluster, {})
    assert chosen is not None, f"{place.name}: no plan at all"
    name = way_named(chosen[0])
    designs = {way: made for way, fix in WAYS.items() if (made := asked(place, cluster, fix)) is not None}
    designs[name] = chosen
    found: dict[str, Any] = {}
    before = fixed_seconds()
    for way, (made, predicted) in designs.items():
        curve = step_of(made, place, predicted=predicted, folder=folder)
        after = fixed_seconds()
        times = (before + after) / (2.0 * usual)
        then, seconds = predicted_on(made, times), usual_step(curve.seconds, every=rounds_of(made))
        told = f"{seconds:.3f} s a step, predicted {then:.3f} on cores {times:.2f} times as slow"
        print(f"{place.name}, {way}{' (chosen)' if way == name else ''}: {told}", flush=True)
        found[way] = {
            "plan": made.plan.describe(),
            "setting": losses.setting_of(made.plan.gradients),
            "predicted": predicted,
            "predicted_then": then,
            "step_seconds": seconds,
            "fixed_seconds": [before, after, usual],
            **asdict(curve),
        }
        before = after
    return {"chosen": name, "machine": record.machine(), "ways": found}


def rows_of(name: str, place: Mapping[str, Any], *, curves: Mapping[str, losses.Curve]) -> list[record.Row]:
    """The choice against the fastest way, its step against the predicted one, and its time to a loss."""
    ways, chosen = place["ways"], place["chosen"]
    steps = {way: each["step_seconds"] * each["predicted"] / each["predicted_then"] for way, each in ways.items()}
    loss = curves[losses.EVERY_STEP][LOSS_AT]
    times = {way: steps[way] * steps_to(loss, curves[ways[way]["setting"]]) for way in ways}
    best, first = (min(found, key=lambda way: found[way]) for found in (steps, times))
    behind, late = steps[chosen] / steps[best] - 1.0, times[chosen] / times[first] - 1.0
    reached = min(curves[ways[chosen]["setting"]].values()) <= loss
    missed = ways[chosen]["predicted"] / steps[chosen] - 1.0
    setting = ways[chosen]["setting"]
    return [
        record.Row(
            name=f"{name}: step of the choice ({chosen}, {setting}) beyond the shortest ({best})",
            target="told",
            measured=f"{100 * behind:.1f} %",
            holds=True,
        ),
        record.Row(
            name=f"{name}: predicted step of the choice",
            target="15 %",
            measured=f"{100 * missed:+.1f} %",
            holds=abs(missed) <= 0.15,
        ),
        record.Row(
            name=f"{name}: time to a loss of {loss:.2f} beyond the shortest ({first})",
            target="10 %",
            measured=f"{100 * late:.1f} %" if reached else "not reached",
            holds=reached and late <= 0.10,
        ),
    ]


def kept() -> dict[str, Any]:
    """By place what an earlier call measured; nothing of results that have another form."""
    path = record.RESULTS / "choice.json"
    raw = json.loads(path.read_text())["raw"] if path.is_file() else {}
    return {place.name: raw[place.name] for place in PLACES if "ways" in raw.get(place.name, {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, nargs="*", default=list(range(len(PLACES))))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="of the losses by step")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-choice")
    options = parser.parse_args()
    if why := unfit():
        print(f"skipped: {why}", file=sys.stderr)
        sys.exit(ExitCode.ENVIRONMENT)
    options.folder.mkdir(parents=True, exist_ok=True)
    one, usual = measured_device(options.folder / "one-core.json")
    for place in (PLACES[index] for index in options.places):
        found = measured_in(place, one, usual=usual, folder=options.folder / "run")
        raw = {**kept(), place.name: found}
        record.keep("choice", [], raw)
    raw = kept()
    settings = {each["setting"] for place in raw.values() for each in place["ways"].values()}
    curves = {
        setting: losses.mean_curve([losses.curve_of(setting, seed=seed, steps=losses.STEPS) for seed in options.seeds])
        for setting in sorted(settings)
    }
    rows = [row for name, place in raw.items() for row in rows_of(name, place, curves=curves)]
    record.finish("choice", rows, {**raw, "curves": curves})


if __name__ == "__main__":
    in_a_lab(main)
