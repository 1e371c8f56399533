"""How long learners stand still while one of them has stopped: `python benchmarks/faults/stopped_learner.py`.

Three learners of one process each train one layer of llama-5m on this machine and meet as diloco every 5 steps; one
is stopped for some seconds and goes on. With a quorum of two the others wait for no longer than the grace; with all
learners they wait until it is back.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from meshwright import catalog, search
from meshwright.run.train import train
from meshwright.spec.cluster import Precision
from meshwright.spec.job import CheckpointSpec, Constraints, Decay, EvaluationSpec, LearningRate
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import GradientSync, Rounds, SynchronizeSpec, SyncKind

ROOT = Path(__file__).resolve().parent.parent.parent
LEARNERS, EVERY, STEPS, STRUCK, GRACE = 3, 5, 50, 12, 0.5


def design(quorum: int) -> Design:
    job = catalog.load_job(str(ROOT / "examples" / "demo.toml"))
    tokens = 64 * 4 * LEARNERS
    rounds = Rounds(every=EVERY, learning_rate=0.7, momentum=0.9, quorum=quorum, grace_seconds=GRACE * (quorum > 0))
    job = replace(
        job,
        sequence_length=64,
        batch_tokens=tokens,
        total_tokens=STEPS * tokens,
        precision=Precision.FP32,
        data=replace(job.data, tokenizer="bytes", document_mask=False),
        learning_rate=LearningRate(decay=Decay.CONSTANT, warmup_steps=20),
        evaluation=EvaluationSpec(every_steps=0, tokens=8192),
        checkpoint=CheckpointSpec(keep=1),
        synchronize=SynchronizeSpec(kinds=(SyncKind.DILOCO,)),
        constraints=Constraints(fix={"replicate": LEARNERS, "sync": "diloco"}),
    )
    cluster = catalog.local_cluster(cores=2, memory_bytes=LEARNERS * 2**31, devices=LEARNERS, name="here")
    model = catalog.load_model("llama-5m")
    model = replace(model, name="one-layer", layers=model.layers[:1])
    found = search.design(model, cluster, job).design
    gradients = GradientSync(kind=SyncKind.DILOCO, rounds=rounds)
    return replace(found, plan=replace(found.plan, gradients=gradients))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def worker(rank: int) -> psutil.Process:
    """The process of that rank, a child of this one."""
    return next(each for each in psutil.Process().children() if each.environ().get("RANK") == str(rank))


def longest_step(quorum: int, *, stopped: float, folder: Path) -> float:
    """Seconds of the longest step of the first learner from the one in which the second one stops on."""
    shutil.rmtree(folder, ignore_errors=True)

    def strike() -> None:
        while len(rows_of(folder)) < STRUCK:
            time.sleep(0.01)
        learner = worker(1)
        learner.suspend()
        time.sleep(stopped)
        learner.resume()

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    train(design(quorum), run_dir=folder, say=print)
    striker.join()
    return max(row["seconds"] for row in rows_of(folder) if STRUCK < row["step"] <= STEPS - EVERY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stopped", type=float, default=5.0, help="seconds for which a learner stands still")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-stopped")
    options = parser.parse_args()
    raw = {
        name: longest_step(quorum, stopped=options.stopped, folder=options.folder / name)
        for name, quorum in (("all", 0), ("two of three", 2))
    }
    limit = 0.5 * options.stopped
    waited = raw["two of three"]
    rows = [
        record.Row(name="longest step, all waited for", target="told", measured=f"{raw['all']:.2f} s", holds=True),
        record.Row(
            name=f"longest step, two of three, grace {GRACE} s",
            target=f"below {limit:.1f} s",
            measured=f"{waited:.2f} s",
            holds=waited < limit,
        ),
    ]
    record.finish("stopped-learner", rows, {"seconds": raw, "stopped": options.stopped})


if __name__ == "__main__":
    main()
