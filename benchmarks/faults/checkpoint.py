"""Checkpoints beside the disk that they go to: bandwidth of save and load over its own, and what training waits for.

    python benchmarks/faults/checkpoint.py [--rounds 5] [--steps 150] [--only bandwidth|training]

The disk's own: one file a rank, of as many bytes as its part of the state, written and flushed, and read when the
operating system has forgotten it. A save counts from when training goes on until its commit is durable, a load until
every byte is checked and in its tensor. Both are done in turns, round by round; ratios are medians over rounds. Then a
model is trained three times: never saved on the way, every 15 steps, and as often as goodput asks for where a machine
fails every half hour. A step is beside a save where that was being written.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import stored
from tests.run import runs
from tests.support import models
from tests.support.designs import Layout
from tests.support.pool import Pool

import record
from meshwright.run.train import train
from meshwright.spec.cluster import Precision
from meshwright.spec.goodput import Moment, Spent
from meshwright.spec.job import CheckpointSpec, EvaluationSpec, Interval
from meshwright.spec.model import Layer, ModelSpec
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.units import format_bytes
from meshwright.train.observe.timekeeper import marks_of

SHARE, STALL = 0.8, 0.02
EVERY = 15
TRAINED, STORED = (512, 8), (2048, 5)  # width and layers: some 315 MiB and 3 GiB of state
HOURS_BETWEEN_FAILURES = 1.0
LAYOUTS = {
    1: Layout(batch=runs.BATCH, precision=Precision.FP32),
    2: Layout(batch=runs.BATCH, shard=2, sharding=Sharding.PARAMETERS, precision=Precision.FP32),
}
SAVING = {
    "never": CheckpointSpec(),
    f"every {EVERY} steps": CheckpointSpec(every_steps=EVERY, keep=0),
    "for goodput": CheckpointSpec(interval=Interval.GOODPUT, keep=0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Seconds of one run: of training and of its stops to save, of steps beside a save and of the others, after the
    first ten; and of every save until it was durable."""

    training_seconds: float
    stopped_seconds: float
    beside: list[float]
    alone: list[float]
    saves: list[float]


def model(width: int, layers: int) -> ModelSpec:
    norm, heads = replace(models.NORM, width=width), width // 64
    mixer = models.attention(width=width, heads=heads, kv_heads=heads, head_dim=64, norm=norm)
    mixer = replace(mixer, rotary=replace(mixer.rotary, dims=64) if mixer.rotary else None)
    layer = Layer(mixer=mixer, transform=models.feed_forward(width=width, hidden=3 * width, norm=norm))
    made = models.model(layer=layer, layers=layers)
    return replace(
        made,
        embedding=replace(made.embedding, vocab=runs.VOCAB, width=width),
        head=replace(made.head, vocab=runs.VOCAB, width=width, norm=norm),
    )


def design(folder: Path, ranks: int, *, steps: int, saving: CheckpointSpec, model: ModelSpec) -> Design:
    evaluation = EvaluationSpec(every_steps=0)
    made = runs.design(folder, LAYOUTS[ranks], steps=steps, evaluation=evaluation, model=model, checkpoint=saving)
    return replace(made, cluster=runs.failing(made.cluster, hours=HOURS_BETWEEN_FAILURES))


def bandwidth(folder: Path, rounds: int) -> tuple[list[record.Row], dict[str, Any]]:
    rows, raw, pool = [], dict[str, Any](), Pool()
    for ranks in LAYOUTS:
        entry = design(folder, ranks, steps=1, saving=CheckpointSpec(), model=model(*STORED))
        took = pool.run(stored.measure, entry, str(folder), rounds, ranks=ranks, timeout=3600.0)[0]
        raw[f"{ranks} ranks"] = asdict(took)
        both = [write + read for write, read in zip(took.disk_write, took.disk_read, strict=True)]
        for name, disk, ours, busy in (
            ("save, of the disk's that writes and reads back", both, took.save, took.save_processor),
            ("save, of the disk's that only writes", took.disk_write, took.save, None),
            ("load, of the disk's", took.disk_read, took.load, took.load_processor),
        ):
            share = statistics.median(plain / other for plain, other in zip(disk, ours, strict=True))
            plain, other = (took.bytes / statistics.median(each) for each in (disk, ours))
            spent = f"; {statistics.median(busy):.2f} s of a processor a rank" if busy else ""
            rows.append(
                record.Row(
                    name=f"{ranks} rank{'s' if ranks > 1 else ''}, {format_bytes(took.bytes)}: {name}",
                    target=f">= {SHARE:.0%}",
                    measured=f"{share:.0%} ({format_bytes(other)}/s, the disk {format_bytes(plain)}/s{spent})",
                    holds=share >= SHARE,
                )
            )
            print(rows[-1].name, rows[-1].measured, flush=True)
        stall, prepared = (statistics.median(each) for each in (took.stall, took.prepared_stall or took.stall))
        rows.append(
            record.Row(
                name=f"{ranks} rank{'s' if ranks > 1 else ''}, {format_bytes(took.bytes)}: a first save stops training",
                target="told",
                measured=f"{prepared:.2f} s; {stall:.2f} s where the memory of its copy was not got before",
                holds=True,
            )
        )
        print(rows[-1].name, rows[-1].measured, flush=True)
    pool.close()
    return rows, raw


def trained(folder: Path, name: str, *, steps: int) -> Trained:
    run = folder / name.replace(" ", "-")
    entry = design(folder, 2, steps=steps, saving=SAVING[name], model=model(*TRAINED))
    outcome = train(entry, run_dir=run, say=lambda _line: None)
    assert outcome.goodput is not None, "the run was kept account of"
    spent = outcome.goodput.seconds
    seconds = {row["step"]: row["seconds"] for row in runs.rows(run) if "loss" in row}
    beside, saves = set[int](), []
    for mark in marks_of(run):
        committed = run / "checkpoints" / f"step-{mark.step:08d}" / "COMMITTED"
        if mark.what is not Moment.SAVED or mark.step >= steps or not committed.is_file():
            continue
        left = os.stat(committed).st_mtime - mark.at
        saves.append(left)
        began = itertools.accumulate((seconds[step] for step in range(mark.step + 1, steps + 1)), initial=0.0)
        beside |= {step for step, at in zip(range(mark.step + 1, steps + 1), began, strict=False) if at < left}
    training = spent[Spent.USEFUL] + spent[Spent.DATA] + spent[Spent.SLOW] + spent[Spent.CHECKPOINT]
    later = {step: taken for step, taken in seconds.items() if step > 10}
    return Trained(
        training_seconds=training,
        stopped_seconds=spent[Spent.CHECKPOINT],
        beside=[taken for step, taken in later.items() if step in beside],
        alone=[taken for step, taken in later.items() if step not in beside],
        saves=saves,
    )


def training(folder: Path, steps: int) -> tuple[list[record.Row], dict[str, Any]]:
    rows, raw, usual = [], dict[str, Any](), 0.0
    for name in SAVING:
        found = trained(folder, name, steps=steps)
        raw[name] = asdict(found)
        alone = statistics.median(found.alone)
        if not found.saves:
            usual = alone
            continue
        share = found.stopped_seconds / found.training_seconds
        beside = statistics.median(found.beside) if found.beside else alone
        extra = sum(found.beside) - alone * len(found.beside)
        rows += [
            record.Row(
                name=f"saves {name}: training stopped for them",
                target=f"<= {STALL:.0%}",
                measured=f"{share:.2%} ({len(found.saves)} saves, {statistics.median(found.saves):.1f} s to write)",
                holds=share <= STALL,
            ),
            record.Row(
                name=f"saves {name}: a step beside one, over the others of the run",
                target="told",
                measured=f"{beside / alone:.2f} ({len(found.beside)} steps, {extra / found.training_seconds:.2%} of the"
                f" run); others over a run never saved {alone / usual:.2f}",
                holds=True,
            ),
        ]
        for row in rows[-2:]:
            print(row.name, row.measured, flush=True)
    return rows, raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", choices=("bandwidth", "training"), default=None)
    parser.add_argument("--on", default=None, help="a folder of the disk that is meant, in place of that of TMPDIR")
    options = parser.parse_args()
    rows, raw = [], dict[str, Any]()
    with tempfile.TemporaryDirectory(dir=options.on) as place:
        if options.only != "training":
            found, raw["bandwidth"] = bandwidth(Path(place), options.rounds)
            rows += found
        if options.only != "bandwidth":
            found, raw["training"] = training(Path(place), options.steps)
            rows += found
    record.finish(f"checkpoint-{options.only}" if options.only else "checkpoint", rows, raw)


if __name__ == "__main__":
    main()
