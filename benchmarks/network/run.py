"""Training over a slow link: steps a second, and validation loss at equal tokens and at equal time, of every way that
replicas can meet. Hosts of a lab with one core each train a model of 5M parameters on real text; root is needed.

How fast a method is does not depend on what it learns, and what it learns does not depend on the link: the loss of
gradients that meet in every step is of a run over a fast link, and its time is that of a few steps over the slow one.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from meshwright import catalog, search
from meshwright.lab import Lab, Topology, Uplink
from meshwright.run.files import write_json
from meshwright.spec.cluster import Precision
from meshwright.spec.job import CheckpointSpec, Constraints, Decay, EvaluationSpec, LearningRate
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import PACKINGS, GradientSync, Rounds, SyncKind, usual_rounds

ROOT = Path(__file__).resolve().parent.parent.parent
FREE, SLOW = 5e9, 12.5e6  # bytes/s; 100 Mbit/s
LENGTH, SEQUENCES = 128, 4  # of one learner and step
TIMED, WARM = 10, 5  # a run looks at its collectives and its memory in the third and the fourth step
NEVER = 10**6
ROOM = 2.5  # times as long as an exchange takes the steps are that it is hidden beside
STOP = 1.2e-8  # seconds of an outer step an element, with rounding at both ends (docs/lab.md)
LATE = (SyncKind.EAGER, SyncKind.CO2)
RECOMMENDED = SyncKind.STREAMING  # docs/learners.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What one run told: seconds of its steps, validation loss by step, bytes that a host sent."""

    seconds: list[float]
    validation: dict[int, float]
    sent_bytes: int

    @property
    def step_seconds(self) -> float:
        """Mean of a step after warming up: what learners do at some steps is spread over all."""
        return statistics.mean(self.seconds[WARM:])

    def loss_after(self, seconds: float) -> float:
        """Validation loss once so much time was spent on steps, between the evaluations before and after."""
        known = sorted((step * self.step_seconds, loss) for step, loss in self.validation.items())
        before = [entry for entry in known if entry[0] <= seconds]
        after = [entry for entry in known if entry[0] > seconds]
        if not before or not after:
            return (before[-1] if before else after[0])[1]
        (t0, loss0), (t1, loss1) = before[-1], after[0]
        return loss0 + (loss1 - loss0) * (seconds - t0) / (t1 - t0)


def design(hosts: int, *, steps: int, seed: int, every: int) -> Design:
    """Replicas over all hosts whose gradients meet in every step; evaluated every so many steps."""
    cluster = catalog.local_cluster(cores=1, memory_bytes=4 * 2**30, devices=1, name="lab")
    cluster = replace(cluster, groups=(replace(cluster.groups[0], num_nodes=hosts, nic=cluster.groups[0].inside),))
    job = catalog.load_job(str(ROOT / "examples" / "demo.toml"))
    tokens = hosts * SEQUENCES * LENGTH
    job = replace(
        job,
        sequence_length=LENGTH,
        batch_tokens=tokens,
        total_tokens=steps * tokens,
        precision=Precision.FP32,
        seed=seed,
        data=replace(job.data, tokenizer="bytes", document_mask=False),
        learning_rate=LearningRate(decay=Decay.CONSTANT, warmup_steps=20),
        evaluation=EvaluationSpec(every_steps=every, tokens=32768),
        checkpoint=CheckpointSpec(keep=1),
        constraints=Constraints(fix={"replicate": hosts}),
    )
    job = replace(job, optimizer=replace(job.optimizer, learning_rate=1e-3))
    return search.design(catalog.load_model("llama-5m"), cluster, job).design


def run(made: Design, *, rate: float, folder: Path, shares: Sequence[float] = ()) -> Curve:
    """The design is trained to its end on hosts joined by links of `rate`, which have `shares` of the cores, even
    ones by default."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "design.json", made)
    hosts = made.plan.world_size
    names = tuple(f"host{index}" for index in range(hosts))
    uplinks = tuple(Uplink(below=name, above="core", bandwidth=rate) for name in names)
    launch = ["-m", "torch.distributed.run", "--nnodes={hosts}", "--node-rank={host}", "--nproc-per-node=1"]
    launch += ["--master-addr={first}", "--master-port={port}", "-m", "meshwright.run.worker", str(folder)]
    with Lab.of(Topology(hosts=names, shares=tuple(shares) or (1.0 / hosts,) * hosts, uplinks=uplinks)) as lab:
        found = lab.run([sys.executable, *launch], timeout_seconds=1200.0)
    for each in found:
        if each.exit_code:
            raise SystemExit(f"{each.host} ended with {each.exit_code}:\n{each.output}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Curve(
        seconds=[row["seconds"] for row in rows if "loss" in row],
        validation={row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row},
        sent_bytes=found[0].traffic.sent_bytes,
    )


def meeting(made: Design, kind: SyncKind, rounds: Rounds) -> Design:
    return replace(made, plan=replace(made.plan, gradients=GradientSync(kind=kind, rounds=rounds)))


def sent_bytes(parameters: int, *, hosts: int, precision: Precision) -> float:
    """What a host sends in a round."""
    packing = PACKINGS.get(precision)
    if packing is None:
        return 2 * (hosts - 1) / hosts * parameters * precision.bytes
    return 2.0 * (hosts - 1) * packing.part_bytes(math.ceil(parameters / hosts))


def rounds_of(made: Design, kind: SyncKind, *, precision: Precision, step: float) -> Rounds:
    """So many steps that an exchange beside them, which takes the cores that train, costs a few per cent of them, and
    an outer step a twentieth at most; where it is waited for, that both are a twentieth of the time."""
    hosts, parameters = made.plan.world_size, made.model.parameters
    exchange = sent_bytes(parameters, hosts=hosts, precision=precision) / SLOW
    hidden, stops = math.ceil(ROOM * exchange / step), math.ceil(20 * STOP * parameters / step)
    if kind in LATE:
        every = max(2, hidden, stops)
    elif kind is SyncKind.STREAMING:
        every = max(4, 2 * hidden, stops)
    else:
        every = max(2, round(20 * exchange / step) + stops)
    return usual_rounds(kind, every=every, learners=hosts, precision=precision)


def rows_of(name: str, values: list[tuple[float, float, float]], *, every: float, steps: int) -> list[record.Row]:
    """Promises of one way of meeting, held against means over the seeds of (step rate, gap, gain)."""
    speed, gap, gain = (statistics.mean(column) for column in zip(*values, strict=True))
    hides = SyncKind(name) in (*LATE, SyncKind.STREAMING)
    gains = hides and name != "co2"
    return [
        record.Row(
            name=f"{name}: step rate beside nobody meeting (every step: {every:.2f})",
            target="0.95" if hides else "told",
            measured=f"{speed:.3f}",
            holds=speed >= 0.95 or not hides,
        ),
        record.Row(
            name=f"{name}: loss above every step's at equal tokens ({steps} steps)",
            target="0.03 nats" if name == RECOMMENDED else "told",
            measured=f"{gap:+.3f} nats",
            holds=gap <= 0.03 or name != RECOMMENDED,
        ),
        record.Row(
            name=f"{name}: loss below every step's at equal time",
            target="0.15 nats" if gains else "told",
            measured=f"{gain:+.3f} nats",
            holds=gain >= 0.15 or not gains,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", default=[kind.value for kind in SyncKind if kind.has_learners])
    parser.add_argument("--precision", type=Precision, default=Precision.FP32, help="of what learners send")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-network")
    options = parser.parse_args()
    hosts, steps, folder = options.hosts, options.steps, options.folder
    every = run(design(hosts, steps=TIMED, seed=0, every=0), rate=SLOW, folder=folder / "slow")
    apart = design(hosts, steps=steps, seed=0, every=0)
    alone = run(meeting(apart, SyncKind.LOCAL, Rounds(every=NEVER)), rate=SLOW, folder=folder / "alone")
    print(f"every step: {every.step_seconds:.3f} s, nobody meets: {alone.step_seconds:.3f} s a step", flush=True)
    raw: dict[str, Any] = {"every_step": every.seconds, "alone": alone.seconds, "runs": {}}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in options.kinds}
    for seed in range(options.seeds):
        made = design(hosts, steps=steps, seed=seed, every=steps // 6)
        free = run(made, rate=FREE, folder=folder / "free")
        raw["runs"][f"every_step, seed {seed}"] = asdict(free)
        print(f"seed {seed} every step: loss {free.validation[steps]:.3f}", flush=True)
        for name in options.kinds:
            kind = SyncKind(name)
            rounds = rounds_of(made, kind, precision=options.precision, step=alone.step_seconds)
            curve = run(meeting(made, kind, rounds), rate=SLOW, folder=folder / name)
            speed, last = alone.step_seconds / curve.step_seconds, curve.validation[steps]
            there = replace(free, seconds=every.seconds).loss_after(steps * curve.step_seconds)
            found[name].append((speed, last - free.validation[steps], there - last))
            raw["runs"][f"{name}, seed {seed}"] = {"rounds": asdict(rounds), **asdict(curve)}
            told = f"{curve.step_seconds:.3f} s a step, {speed:.2f} of nobody meeting, loss {last:.3f}"
            met = f"{name} (every {rounds.every}, {options.precision.value})"
            print(f"seed {seed} {met}: {told}, at equal time {there:.3f}", flush=True)
    share = alone.step_seconds / every.step_seconds
    rows = [row for name, values in found.items() for row in rows_of(name, values, every=share, steps=steps)]
    narrow = "" if options.precision is Precision.FP32 else f"-{options.precision.value}"
    record.finish(f"network-{hosts}{narrow}", rows, raw)


if __name__ == "__main__":
    main()
