"""Training over a slow link: steps a second, and validation loss at equal tokens and at equal time, of every way that
replicas can meet. Hosts of a lab train a model of 5M parameters on real text, with a core each, or an even share of the
cores where there are fewer; root is needed, and without it the exit code is 4.

How fast a method is does not depend on what it learns, and what it learns does not depend on the link: the loss of
gradients that meet in every step is of a run over a fast link, and its time is that of a few steps over the slow one.
Beside each seed hosts that never meet are timed again, for a machine changes its pace. More hosts than two are held
against pairs of them: all hosts train, in pairs that know nothing of each other, so that each has as much of the
machine as before and the link alone is another.

What is exposed of a step of learners is the line `outer synchronisation` of `measured.json`: all that they stand still
for to meet, rounding and the outer step with it. Of gradients that meet in every step it is what the step takes longer
than one of nobody meeting.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from meshwright import catalog, search
from meshwright.lab import Lab, Topology, Uplink
from meshwright.run.files import write_json
from meshwright.run.outcome import read_report
from meshwright.run.signals import interrupted_by_signals
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import EnvironmentUnfit
from meshwright.spec.job import CheckpointSpec, Constraints, Decay, EvaluationSpec, LearningRate
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import PACKINGS, GradientSync, Rounds, SyncKind, usual_rounds

ROOT = Path(__file__).resolve().parent.parent.parent
FREE, SLOW = 5e9, 12.5e6  # bytes/s; 100 Mbit/s
LENGTH, SEQUENCES = 128, 4  # of one learner and step, of the benchmarks beside this one
ROWS = 8  # of one learner and step here: a host that trains alone then has five times the rate of every step's
TIMED, WARM = 15, 5  # a run looks at its collectives and its memory in the third and the fourth step
STEPS, SEEDS = 150, 3  # of a run whose results are kept under the benchmark's name
NEVER = 10**6
ROOM = 2.5  # times as long as an exchange takes the steps are that it is hidden beside
STOP = 1.2e-8  # seconds of an outer step an element, of a whole core, with rounding at both ends (docs/lab.md)
RECOMMENDED = SyncKind.EAGER  # docs/learners.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What one run told: seconds of its steps, validation loss by step, bytes that a host sent, and of a mean step the
    seconds that learners stood still for to meet."""

    seconds: list[float]
    validation: dict[int, float]
    sent_bytes: int
    stood_seconds: float = 0.0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one seed of one way of meeting: its step rate beside nobody meeting, the share of a step that is exposed, loss
    above every step's at equal tokens and below it at equal time, and its step in pairs of hosts over its step in all,
    NaN of two hosts."""

    rate: float
    exposed: float
    gap: float
    gain: float
    scaling: float = math.nan


def design(hosts: int, *, steps: int, seed: int, every: int, sequences: int = SEQUENCES) -> Design:
    """Replicas over all hosts whose gradients meet in every step; evaluated every so many steps."""
    cluster = catalog.local_cluster(cores=1, memory_bytes=4 * 2**30, devices=1, name="lab")
    cluster = replace(cluster, groups=(replace(cluster.groups[0], num_nodes=hosts, nic=cluster.groups[0].inside),))
    job = catalog.load_job(str(ROOT / "examples" / "demo.toml"))
    tokens = hosts * sequences * LENGTH
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


def run(made: Design, *, rate: float, folder: Path, shares: Sequence[float] = (), copies: int = 1) -> Curve:
    """The design is trained to its end on hosts joined by links of `rate`, which have `shares` of the cores, even
    ones by default; so many `copies` of it at once on hosts of their own, of which the first one is told."""
    ranks = made.plan.world_size
    names = tuple(f"host{index}" for index in range(ranks * copies))
    uplinks = tuple(Uplink(below=name, above="core", bandwidth=rate) for name in names)
    topology = Topology(hosts=names, shares=tuple(shares) or (1.0 / len(names),) * len(names), uplinks=uplinks)
    folders = [folder / f"copy{index}" if copies > 1 else folder for index in range(copies)]
    with Lab.of(topology) as lab, ThreadPoolExecutor(max_workers=copies) as threads:
        hosts = [range(index * ranks, (index + 1) * ranks) for index in range(copies)]
        begun = [threads.submit(trained, made, lab, each, place) for each, place in zip(hosts, folders, strict=True)]
        curves = [each.result() for each in begun]
    return curves[0]


def trained(made: Design, lab: Lab, hosts: Sequence[int], folder: Path) -> Curve:
    """The design trained to its end on these hosts of the lab."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "design.json", made)
    launch = ["-m", "torch.distributed.run", "--nnodes={hosts}", "--node-rank={host}", "--nproc-per-node=1"]
    launch += ["--master-addr={first}", "--master-port={port}", "-m", "meshwright.run.worker", str(folder)]
    found = lab.run([sys.executable, *launch], hosts=hosts, timeout_seconds=1200.0)
    for each in found:
        if each.exit_code:
            raise SystemExit(f"{each.host} ended with {each.exit_code}:\n{each.output}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    report = read_report(folder / "measured.json")
    line = report.step.find(LineName.OUTER) if report is not None else None
    return Curve(
        seconds=[row["seconds"] for row in rows if "loss" in row],
        validation={row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row},
        sent_bytes=found[0].traffic.sent_bytes,
        stood_seconds=line.seconds if line is not None else 0.0,
    )


def meeting(made: Design, kind: SyncKind, rounds: Rounds) -> Design:
    return replace(made, plan=replace(made.plan, gradients=GradientSync(kind=kind, rounds=rounds)))


def sent_bytes(parameters: int, *, hosts: int, precision: Precision) -> float:
    """What a host sends in a round."""
    packing = PACKINGS.get(precision)
    if packing is None:
        return 2 * (hosts - 1) / hosts * parameters * precision.bytes
    return 2.0 * (hosts - 1) * packing.part_bytes(math.ceil(parameters / hosts))


def rounds_of(made: Design, kind: SyncKind, *, precision: Precision, step: float, cores: float) -> Rounds:
    """So many steps that an exchange beside them, which takes the cores that train, costs a few per cent of them on a
    host with so many `cores`, and an outer step a twentieth at most; where it is waited for, that both are a twentieth
    of the time."""
    hosts, parameters, whole = made.plan.world_size, made.model.parameters, min(1.0, cores)
    exchange = sent_bytes(parameters, hosts=hosts, precision=precision) / SLOW
    hidden, stops = math.ceil(ROOM * exchange / (whole * step)), math.ceil(20 * STOP * parameters / (whole * step))
    if kind is SyncKind.CO2:
        every = max(2, hidden, stops)
    elif kind.in_parts:
        every = max(4, 2 * hidden, stops)
    else:
        every = max(2, round(20 * exchange / step) + stops)
    return usual_rounds(kind, every=every, learners=hosts, precision=precision)


class Benchmark:
    """All ways of meeting on so many hosts; what each seed of each tells is kept as it comes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.hosts, self.steps, self.folder = options.hosts, options.steps, options.folder
        self.precision = options.precision
        self.pairs = self.hosts // 2 if self.hosts > 2 else 0
        self.cores = len(os.sched_getaffinity(0)) / self.hosts
        self.found: dict[str, list[Found]] = {name: [] for name in options.kinds}
        self.every, self.every_pairs = self.in_every_step(self.hosts), self.in_every_step(2) if self.pairs else None
        self.raw: dict[str, Any] = {"every_step": asdict(self.every), "runs": {}}
        if self.every_pairs is not None:
            self.raw["pairs of every_step"] = asdict(self.every_pairs)
        self.alone: list[Curve] = []

    def in_every_step(self, hosts: int) -> Curve:
        made = design(hosts, steps=TIMED, seed=0, every=0, sequences=ROWS)
        return run(made, rate=SLOW, folder=self.folder / "slow", copies=self.hosts // hosts)

    def seed(self, seed: int) -> None:
        """Nobody meeting, every step over a fast link, and each way over the slow one."""
        made = design(self.hosts, steps=self.steps, seed=seed, every=self.steps // 6, sequences=ROWS)
        apart = design(self.hosts, steps=self.steps // 2, seed=seed, every=0, sequences=ROWS)
        never = meeting(apart, SyncKind.LOCAL, Rounds(every=NEVER))
        self.alone.append(run(never, rate=SLOW, folder=self.folder / "alone"))
        free = run(made, rate=FREE, folder=self.folder / "free")
        self.raw["runs"][f"alone, seed {seed}"] = asdict(self.alone[-1])
        self.raw["runs"][f"every_step, seed {seed}"] = asdict(free)
        told = f"nobody meeting {self.alone[-1].step_seconds:.3f} s a step, every step {self.every.step_seconds:.3f}"
        print(f"seed {seed}: {told}, loss {free.validation[self.steps]:.3f}", flush=True)
        for name in self.found:
            self.way(SyncKind(name), made, seed=seed, free=free)

    def way(self, kind: SyncKind, made: Design, *, seed: int, free: Curve) -> None:
        step, alone = self.alone[0].step_seconds, self.alone[-1].step_seconds
        rounds = rounds_of(made, kind, precision=self.precision, step=step, cores=self.cores)
        curve = run(meeting(made, kind, rounds), rate=SLOW, folder=self.folder / kind.value)
        self.raw["runs"][f"{kind.value}, seed {seed}"] = {"rounds": asdict(rounds), **asdict(curve)}
        last = curve.validation[self.steps]
        there = replace(free, seconds=self.every.seconds).loss_after(self.steps * curve.step_seconds)
        found = Found(
            rate=alone / curve.step_seconds,
            exposed=curve.stood_seconds / curve.step_seconds,
            gap=last - free.validation[self.steps],
            gain=there - last,
            scaling=self.scaling(kind, seed=seed) / curve.step_seconds if self.pairs else math.nan,
        )
        self.found[kind.value].append(found)
        told = f"{curve.step_seconds:.3f} s a step, {found.rate:.3f} of nobody meeting, {found.exposed:.3f} exposed"
        scaled = f", {found.scaling:.3f} of the rate in pairs" if self.pairs else ""
        met = f"{kind.value} (every {rounds.every}, {self.precision.value})"
        print(f"seed {seed} {met}: {told}{scaled}, loss {last:.3f}, at equal time {there:.3f}", flush=True)

    def scaling(self, kind: SyncKind, *, seed: int) -> float:
        """Seconds of a step of pairs of hosts, which meet as often as hides what they send."""
        made, step = design(2, steps=self.steps // 2, seed=seed, every=0, sequences=ROWS), self.alone[0].step_seconds
        rounds = rounds_of(made, kind, precision=self.precision, step=step, cores=self.cores)
        curve = run(meeting(made, kind, rounds), rate=SLOW, folder=self.folder / "pairs", copies=self.pairs)
        self.raw["runs"][f"pairs of {kind.value}, seed {seed}"] = {"rounds": asdict(rounds), **asdict(curve)}
        return curve.step_seconds

    def rows(self) -> list[record.Row]:
        alone = statistics.mean(each.step_seconds for each in self.alone)
        share = alone / self.every.step_seconds
        beside = {"rate": share, "exposed": 1.0 - share}
        if self.every_pairs is not None:
            beside["scaling"] = self.every_pairs.step_seconds / self.every.step_seconds
        return [
            row
            for name, values in self.found.items()
            for row in rows_of(name, values, beside=beside, hosts=self.hosts, steps=self.steps)
        ]


def rows_of(
    name: str, values: Sequence[Found], *, beside: dict[str, float], hosts: int, steps: int
) -> list[record.Row]:
    """Promises of one way of meeting, held against means over the seeds; `beside` are figures of every step."""
    mean = Found(**{field: statistics.mean(getattr(each, field) for each in values) for field in Found.__slots__})
    hides = not SyncKind(name).waits
    seeds = f"{len(values)} seed{'s' * (len(values) != 1)}"

    def row(what: str, measured: str, target: str, *, promised: bool, holds: bool) -> record.Row:
        target = target if promised else "told"
        return record.Row(name=f"{name}: {what}", target=target, measured=measured, holds=holds or not promised)

    rate = f"step rate beside nobody meeting (every step: {beside['rate']:.2f})"
    exposed = f"exposed share of a step (every step: {100 * beside['exposed']:.0f} %)"
    gap = f"loss above every step's at equal tokens ({steps} steps of {ROWS * LENGTH} tokens, {seeds})"
    gain = "loss below every step's at equal time"
    rows = [
        row(rate, f"{mean.rate:.3f}", "0.95", promised=hides, holds=mean.rate >= 0.95),
        row(exposed, f"{100 * mean.exposed:.1f} %", "5 %", promised=hides, holds=mean.exposed <= 0.05),
        row(gap, f"{mean.gap:+.3f} nats", "0.03 nats", promised=name == RECOMMENDED, holds=mean.gap <= 0.03),
        row(gain, f"{mean.gain:+.3f} nats", "0.15 nats", promised=hides and name != "co2", holds=mean.gain >= 0.15),
    ]
    if "scaling" in beside:
        scaling = f"step rate of {hosts} hosts over that of 2 (every step: {beside['scaling']:.2f})"
        rows.append(row(scaling, f"{mean.scaling:.3f}", "0.95", promised=hides, holds=mean.scaling >= 0.95))
    return rows


def kept(name: str, rows: list[record.Row], raw: dict[str, Any]) -> tuple[list[record.Row], dict[str, Any]]:
    """What was found, with what the results of that name have of ways of meeting that were not run now."""
    path = record.RESULTS / f"{name}.json"
    if not path.is_file():
        return rows, raw
    before = json.loads(path.read_text())
    ran = {row.name.partition(":")[0] for row in rows}
    old = [record.Row(**row) for row in before["rows"] if row["name"].partition(":")[0] not in ran]
    if not old:
        return rows, raw
    ways = sorted({row.name.partition(":")[0] for row in old})
    runs = {**before["raw"]["runs"], **raw["runs"]}
    return [*rows, *old], {**raw, "kept": {"ways": ways, "machine": before["machine"]}, "runs": runs}


def in_a_lab(main: Callable[[], None]) -> None:
    """`main` runs to its end; where no lab can be made, why is told and the exit code is 4. Asked to end, it leaves no
    lab behind."""
    try:
        with interrupted_by_signals():
            main()
    except EnvironmentUnfit as error:
        print(f"error: {error}; not run", file=sys.stderr)
        sys.exit(error.exit_code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, choices=range(2, 17, 2), metavar="N")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    kinds = [kind.value for kind in SyncKind if kind.has_learners]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--precision", type=Precision, default=Precision.FP32, help="of what learners send")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-network")
    options = parser.parse_args()
    benchmark = Benchmark(options)
    for seed in range(options.seeds):
        benchmark.seed(seed)
    narrow = "" if options.precision is Precision.FP32 else f"-{options.precision.value}"
    name, rows, raw = f"network-{options.hosts}{narrow}", benchmark.rows(), benchmark.raw
    if options.steps != STEPS or options.seeds < SEEDS:
        record.finish(f"{name}-short", rows, raw)
    record.finish(name, *kept(name, rows, raw))


if __name__ == "__main__":
    in_a_lab(main)
