"""Runs of a tiny model over a small text, and what they wrote."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from meshwright import catalog
from meshwright.run.files import write_json
from meshwright.run.launch import WORKER_MODULE
from meshwright.run.outcome import Ended, ended_path
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.job import CheckpointSpec, DataSpec, Decay, EvaluationSpec, LearningRate, Source
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design
from meshwright.train.checkpoint import Manifest
from meshwright.train.checkpoint.find import path_of
from meshwright.train.checkpoint.manifest import FileRecord, seal, write_manifest
from meshwright.train.events import Ending
from tests.support import designs, models
from tests.support.designs import Layout

BATCH = 8
VOCAB = 264


def text(folder: Path) -> Path:
    """Forty short documents, one a line."""
    path = folder / "text.jsonl"
    if not path.is_file():
        lines = [json.dumps({"text": f"{n} times {n} is {n * n}, and " * 12}) for n in range(40)]
        path.write_text("\n".join(lines))
    return path


def design(
    folder: Path, layout: Layout | None = None, *, steps: int, model: ModelSpec | None = None, **changes: Any
) -> Design:
    """A design that trains `steps` steps of BATCH sequences in fp64 and evaluates every fourth step; of a tiny model,
    or of another one over VOCAB tokens."""
    tiny = models.model(
        embedding=replace(models.model().embedding, vocab=VOCAB), head=replace(models.model().head, vocab=VOCAB)
    )
    made = designs.design(model or tiny, layout or Layout(batch=BATCH))
    job = replace(
        made.job,
        total_tokens=steps * made.job.batch_tokens,
        data=DataSpec(sources=(Source(path=str(text(folder))),), validation_fraction=0.2),
        evaluation=EvaluationSpec(every_steps=4, tokens=BATCH * designs.SEQUENCE * 2),
        checkpoint=CheckpointSpec(every_steps=0),
        learning_rate=LearningRate(decay=Decay.CONSTANT, warmup_steps=4),
    )
    ranks = made.plan.world_size
    return replace(made, cluster=cluster(ranks), job=replace(job, **changes))


def cluster(ranks: int) -> ClusterSpec:
    """This kind of machine, which multiplies in fp64 half as fast as in fp32, and in fp16 as in bf16."""
    here = catalog.local_cluster(cores=2, memory_bytes=ranks * 2**32, devices=ranks, name="here")
    device = here.groups[0].device
    like = {Precision.FP64: Precision.FP32, Precision.FP16: Precision.BF16}
    peak = device.peak_flops | {kind: device.peak_flops[other] for kind, other in like.items()}
    peak[Precision.FP64] /= 2
    matrix = device.matrix | {kind: device.matrix[other] for kind, other in like.items()}
    device = replace(device, peak_flops=peak, matrix=matrix)
    return replace(here, groups=(replace(here.groups[0], device=device),))


def failing(cluster: ClusterSpec, *, hours: float) -> ClusterSpec:
    """The same machines, of which each device fails every so many hours."""
    (group,) = cluster.groups
    return replace(cluster, groups=(replace(group, device=replace(group.device, hours_between_failures=hours)),))


def saved(run: Path, step: int) -> Path:
    """A checkpoint of that step, whole by its marker, manifest and file sizes."""
    folder = path_of(run / "checkpoints", step)
    folder.mkdir(parents=True)
    (folder / "data").write_text("weights")
    files = {"data": FileRecord(bytes=len("weights"), step=step)}
    manifest = Manifest(
        step=step,
        state={},
        plan="",
        layout="",
        model="",
        model_name="",
        world_size=1,
        versions={},
        files=files,
        index="",
    )
    write_manifest(folder, manifest)
    seal(folder)
    return folder


def done(run: Path, made: Design) -> None:
    """`run` holds what is asked of a run that has trained all steps of `made`."""
    steps = made.job.total_steps
    saved(run, steps)
    write_json(run / "design.json", made)
    (run / "measured.json").write_text("{}")
    ended = Ended(ending=Ending.FINISHED, step=steps, total_steps=steps, tokens=made.job.total_tokens, seconds=1.0)
    write_json(ended_path(run), ended)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(run_dir) if "loss" in row}


def validation(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["validation_loss"] for row in rows(run_dir) if "validation_loss" in row}


def worker_of(rank: int) -> psutil.Process:
    for child in psutil.Process().children():
        if WORKER_MODULE in child.cmdline() and child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"no worker of rank {rank}")


def after_steps(run_dir: Path, steps: int, act: Callable[[], None]) -> threading.Thread:
    """`act` is called once `steps` steps are in the metrics; the thread that waits for it."""

    def wait() -> None:
        end = time.monotonic() + 120.0
        while len(losses(run_dir)) < steps and time.monotonic() < end:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
