"""What the loss of one of four ranks costs: survivors that train on, beside a restart of all of them under torchrun,
and for replicas beside torchft where that is installed.

    python benchmarks/faults/lost_rank.py [--steps 40]

Both train the same design; one worker is killed (kill -9) after so many steps, and again as many are trained after all
ranks are back. Steps are timed by when their line comes into `metrics.jsonl`. The replacement's coming pauses the
others for what lies between the last step before it and the first after it, less the usual step that is in that; it is
timed with longer steps too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torchft_beside

import record
from meshwright import catalog, search
from meshwright.run.elastic.epochs import epochs_path
from meshwright.run.files import write_json
from meshwright.run.train import train, with_absolute_paths
from meshwright.spec.job import ElasticSpec
from meshwright.spec.plan import Design

ROOT = Path(__file__).resolve().parent.parent.parent
RANKS, LOST = 4, 2
ROWS, MANY_ROWS = 12, 72  # sequences of a step, and of a longer one
PATIENCE_SECONDS = 300.0
LAYOUTS = {
    "replicas": ("constraints.fix.replicate=4",),
    "shards": ("constraints.fix.shard=4", "constraints.fix.zero=3"),
    "stages": ("constraints.fix.pipeline=2", "constraints.fix.replicate=2"),
}


@dataclass(slots=True, kw_only=True)
class Watched:
    """When each line of a run's metrics came, in seconds of the system clock, and its step."""

    run: Path
    seen: list[tuple[float, int]] = field(default_factory=list)

    def look(self) -> None:
        with suppress(OSError, ValueError, IndexError):
            lines = (self.run / "metrics.jsonl").read_bytes().splitlines()[-1:]
            row = json.loads(lines[0])
            if "loss" in row and (not self.seen or self.seen[-1][1] != row["step"]):
                self.seen.append((time.time(), int(row["step"])))

    @property
    def step(self) -> int:
        return self.seen[-1][1] if self.seen else 0

    def first_after(self, moment: float) -> tuple[float, int]:
        return next(entry for entry in self.seen if entry[0] > moment)

    def last_before(self, moment: float) -> tuple[float, int]:
        return [entry for entry in self.seen if entry[0] <= moment][-1]

    def until(self, known: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not known():
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.002)


@contextmanager
def watched(run: Path) -> Iterator[Watched]:
    found, stop = Watched(run=run), threading.Event()

    def look() -> None:
        while not stop.wait(0.002):
            found.look()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def design_of(sets: tuple[str, ...], *, rows: int) -> Design:
    job = catalog.load_job(
        str(ROOT / "examples" / "demo.toml"),
        sets=[
            "data.tokenizer=bytes",
            "sequence_length=128",
            f"batch_tokens={rows * 128}",
            f"total_tokens={rows * 128 * 100_000}",
            "constraints.order=usual",
            "constraints.devices=all",
            "evaluation.every_steps=0",
            *sets,
        ],
    )
    cluster = catalog.load_cluster(f"local:{RANKS}")
    made = search.design(catalog.load_model("tiny"), cluster, job, top=1, trainable=True).design
    return with_absolute_paths(made)


def elastic(design: Design, run: Path, *, steps: int) -> dict[str, Any]:
    """One worker is killed while the run is elastic; what that cost."""
    entry = replace(design, job=replace(design.job, elastic=ElasticSpec(min_ranks=2)))
    found: dict[str, Any] = {}

    def epochs() -> list[dict[str, Any]]:
        path = epochs_path(run)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def pids() -> dict[str, int]:
        workers = {child.pid: child.cmdline() for child in psutil.Process().children()}
        return {line[line.index("--member") + 1]: pid for pid, line in workers.items() if "--member" in line}

    with watched(run) as lines:

        def act() -> None:
            lines.until(lambda: lines.step >= steps)
            before = pids()
            found["killed_at"] = time.time()
            os.kill(before[f"{LOST}.0"], signal.SIGKILL)
            lines.until(lambda: len(epochs()) == 3 and lines.seen[-1][0] > epochs()[2]["at"])
            step = lines.step
            lines.until(lambda: lines.step >= step + steps)
            found["restarted"] = [name for name, pid in before.items() if name != f"{LOST}.0" and pids()[name] != pid]
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        outcome = train(entry, run_dir=run, say=lambda _line: None)
        thread.join()
    _, lost, back = epochs()
    killed, usual = found["killed_at"], _usual(lines, before=found["killed_at"])
    gap = lines.first_after(back["at"])[0] - lines.last_before(back["at"])[0]
    return {
        "usual_step_seconds": usual,
        "noticed_seconds": lost["since"] - killed,
        "formed_seconds": lost["at"] - killed,
        "stall_seconds": lines.first_after(lost["at"])[0] - killed,
        "undone_steps": lost["undone_steps"],
        "restarted": found["restarted"],
        "back_seconds": lines.first_after(back["at"])[0] - killed,
        "growth_seconds": gap,
        "pause_seconds": gap - usual,
        "plans": [one["plan"] for one in epochs()],
        "interruptions": [one.lost_seconds for one in outcome.goodput.interruptions] if outcome.goodput else [],
    }


def restarted(design: Design, run: Path, *, steps: int) -> dict[str, Any]:
    """The same under torchrun, which starts all workers again; a checkpoint every ten steps."""
    run.mkdir()
    checkpoint = replace(design.job.checkpoint, every_steps=10)
    write_json(run / "design.json", replace(design, job=replace(design.job, checkpoint=checkpoint)))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "3"]
    command += ["--monitor-interval", "0.1", "-m", "meshwright.run.worker", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with watched(run) as lines, open(run / "torchrun.log", "wb") as log:
        process = subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)
        try:
            lines.until(lambda: lines.step >= steps)
            worker = next(
                child
                for child in psutil.Process(process.pid).children()
                if child.environ().get("RANK") == str(LOST) and "meshwright.run.worker" in child.cmdline()
            )
            killed, reached = time.time(), lines.step
            worker.kill()
            lines.until(lambda: lines.seen[-1][0] > killed + 1.0)
            again = lines.first_after(killed + 1.0)
            lines.until(lambda: lines.step > reached and lines.seen[-1][0] >= again[0])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    return {
        "usual_step_seconds": _usual(lines, before=killed),
        "stall_seconds": again[0] - killed,
        "undone_steps": reached - again[1] + 1,
    }


def _under_torchft(design: Design, run: Path, *, steps: int, step_seconds: float) -> dict[str, Any] | None:
    """The same under torchft, which does replicas; None where it is not installed."""
    if not torchft_beside.installed():
        print("torchft is not installed: pip install meshwright[beside]", flush=True)
        return None
    patient = Watched(run=run)
    with torchft_beside.errors_in(run.with_suffix(".log")):
        return torchft_beside.torchft(
            design, run, steps=steps, lost=LOST, step_seconds=step_seconds, until=patient.until
        )


def _usual(lines: Watched, *, before: float) -> float:
    times = [moment for moment, _ in lines.seen if moment <= before]
    return statistics.median(later - sooner for sooner, later in pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", choices=LAYOUTS, default=None)
    options = parser.parse_args()
    rows, raw = [], dict[str, Any]()
    for name, sets in LAYOUTS.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as place:
            design = design_of(sets, rows=ROWS)
            ours = elastic(design, Path(place) / "elastic", steps=options.steps)
            longer = elastic(design_of(sets, rows=MANY_ROWS), Path(place) / "longer", steps=options.steps)
            theirs = restarted(design, Path(place) / "torchrun", steps=options.steps)
            step, beside = ours["usual_step_seconds"], None
            if name == "replicas":
                beside = _under_torchft(design, Path(place) / "torchft", steps=options.steps, step_seconds=step)
        raw[name] = {
            "plan": design.plan.describe(),
            "elastic": ours,
            "longer": longer,
            "torchrun": theirs,
            "torchft": beside,
        }
        found = [
            *told(name, ours, theirs),
            paused(name, ours),
            paused(name, longer),
            *([] if beside is None else [told_beside(ours, beside)]),
        ]
        for row in found:
            print(row.name, row.target, row.measured, flush=True)
        rows += found
    record.finish("lost_rank", rows, raw)


def told(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[record.Row]:
    return [
        record.Row(
            name=f"{name}: kill -9 of one of four, until the others end a step",
            target="<= 1 s",
            measured=f"{ours['stall_seconds']:.2f} s",
            holds=ours["stall_seconds"] <= 1.0,
        ),
        record.Row(
            name=f"{name}: the same under torchrun, which starts all again",
            target="slower",
            measured=f"{theirs['stall_seconds']:.2f} s, {theirs['undone_steps']} steps again",
            holds=theirs["stall_seconds"] > ours["stall_seconds"],
        ),
        record.Row(
            name=f"{name}: survivors started again, steps done again",
            target="0, <= 1",
            measured=f"{len(ours['restarted'])}, {ours['undone_steps']}",
            holds=not ours["restarted"] and ours["undone_steps"] <= 1,
        ),
        record.Row(
            name=f"{name}: until all four train again",
            target="told",
            measured=f"{ours['back_seconds']:.2f} s",
            holds=True,
        ),
    ]


def paused(name: str, ours: dict[str, Any]) -> record.Row:
    step = ours["usual_step_seconds"]
    return record.Row(
        name=f"{name}: pause to take the replacement in, beside the step in it",
        target=f"<= a step, {step:.3f} s",
        measured=f"{ours['pause_seconds']:.2f} s",
        holds=ours["pause_seconds"] <= step,
    )


def told_beside(ours: dict[str, Any], theirs: dict[str, Any]) -> record.Row:
    measured = f"{theirs['stall_seconds']:.2f} s, pause to take it in {theirs['growth_seconds']:.2f} s"
    return record.Row(
        name="replicas: the same under torchft, by its time-outs",
        target="slower",
        measured=f"{measured}, all four after {theirs['back_seconds']:.2f} s",
        holds=theirs["stall_seconds"] > ours["stall_seconds"],
    )


if __name__ == "__main__":
    main()
