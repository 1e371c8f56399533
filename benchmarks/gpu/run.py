"""One accelerator, a Llama of 1.2 B parameters: tokens/s beside a plain loop, MFU, and what was predicted.

`meshwright cluster measure` runs first. The plan that meshwright picks for each precision, as written and compiled, is
trained in turn with plain.py in bf16 under torch.compile, at the microbatch that is fastest for it. `--device cpu` with
a small model tries the benchmark itself, and keeps what it found under another name.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plans
import record
import yardstick
from meshwright import catalog, search
from meshwright.run.machine import cache_root
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.job import Switch
from meshwright.spec.plan import Design

ROOT = Path(__file__).resolve().parent.parent.parent
ROUNDS, STEPS, TRIAL_STEPS = 3, 24, 8
WITHIN_SECONDS, WITHIN_BYTES = 0.05, 0.02
KINDS = {
    "bf16": (Precision.BF16, Switch.OFF),
    "bf16 compiled": (Precision.BF16, Switch.ON),
    "fp8 compiled": (Precision.FP8, Switch.ON),
}
YARDSTICK = "bf16 compiled"


def designs(options: argparse.Namespace) -> dict[str, Design]:
    """What meshwright picks for each precision; a precision that the device has no units for is left out and told."""
    model, machine = catalog.load_model(options.model), catalog.load_cluster("local:1", cache=cache_root())
    sets = [f"sequence_length={options.sequence_length}", f"batch_tokens={options.batch_tokens}"]
    job = catalog.load_job(str(ROOT / "examples" / "demo.toml"), sets=[*sets, "data.tokenizer=bytes"])
    job = replace(
        job,
        data=replace(job.data, document_mask=False),
        evaluation=replace(job.evaluation, every_steps=0, tokens=job.batch_tokens),
        checkpoint=replace(job.checkpoint, keep=1),
    )
    found = {}
    for name, (precision, compiled) in KINDS.items():
        asked = replace(job, precision=precision, compile=compiled)
        try:
            found[name] = search.design(model, machine, asked, top=1, trainable=True).design
        except MeshwrightError as error:
            print(f"{name}: left out: {error}", flush=True)
    return found


def fastest_microbatch(design: Design, *, device: str) -> int:
    """Of the plain loop, among those that it has memory for."""
    seconds = {}
    for size in (size for size in (1, 2, 4, 8, 16, 32) if design.plan.batch % size == 0):
        try:
            taken = yardstick.plain(design, microbatch=size, steps=TRIAL_STEPS, device=device, compiled=True)
        except subprocess.CalledProcessError:
            break
        seconds[size] = taken.step_seconds
        print(f"plain, {size} sequences at a time: {1e3 * seconds[size]:.1f} ms", flush=True)
    return min(seconds, key=lambda size: seconds[size])


def in_turn(
    found: dict[str, Design], *, device: str, folder: Path, turns: int
) -> Iterator[tuple[dict[str, list[plans.Measured]], list[float], set[str]]]:
    """After every turn of all designs and the plain loop, one after another: what was measured till then, and which
    designs have failed, that are left out from then on."""
    size = fastest_microbatch(found[YARDSTICK], device=device)
    ours: dict[str, list[plans.Measured]] = {name: [] for name in found}
    theirs: list[float] = []
    failed: set[str] = set()
    for turn in range(turns):
        for name in (name for name in found if name not in failed):
            try:
                run = plans.run(found[name], folder=folder / f"{turn}-{name.replace(' ', '-')}", steps=STEPS)
            except subprocess.CalledProcessError as error:
                failed.add(name)
                print(f"{name}: failed: {error.output}", flush=True)
                continue
            ours[name].append(run)
            print(f"{name}: {1e3 * step_seconds([run]):.1f} ms", flush=True)
        taken = yardstick.plain(found[YARDSTICK], microbatch=size, steps=STEPS, device=device, compiled=True)
        theirs.append(taken.step_seconds)
        print(f"plain: {1e3 * theirs[-1]:.1f} ms", flush=True)
        yield {name: runs for name, runs in ours.items() if runs}, theirs, failed


def step_seconds(runs: Sequence[plans.Measured]) -> float:
    return statistics.median(statistics.median(run.steps[yardstick.WARM_UP :]) for run in runs)


def rows_of(name: str, design: Design, runs: Sequence[plans.Measured], *, plain: float) -> list[record.Row]:
    """One design beside the plain loop, beside its device, and beside what was predicted of it."""
    seconds = step_seconds(runs)
    rate = design.plan.batch * design.plan.sequence_length / seconds
    error, memory = runs[0].predicted_seconds / seconds - 1.0, runs[0].memory_error
    rows = [
        record.Row(
            name=f"{name}: tokens/s over the plain loop's",
            target=">= 1.0",
            measured=f"{plain / seconds:.3f} ({rate:,.0f} tokens/s)",
            holds=plain / seconds >= 1.0,
        ),
        record.Row(
            name=f"{name}: predicted step",
            target="within 5 %",
            measured=f"{100 * error:+.1f} % of {1e3 * seconds:.1f} ms",
            holds=abs(error) <= WITHIN_SECONDS,
        ),
        record.Row(
            name=f"{name}: predicted memory",
            target="within 2 %",
            measured=f"{100 * memory:+.1f} % of {runs[0].measured_bytes / 2**30:.2f} GiB",
            holds=abs(memory) <= WITHIN_BYTES,
        ),
    ]
    utilisation = statistics.median(run.mfu or 0.0 for run in runs)
    if name == YARDSTICK:
        measured = f"{100 * utilisation:.1f} %"
        rows.append(record.Row(name=f"{name}: MFU", target=">= 50 %", measured=measured, holds=utilisation >= 0.5))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=64 * 1024)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-gpu")
    parser.add_argument("--turns", type=int, default=ROUNDS)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    subprocess.run([plans.COMMAND, "cluster", "measure", "--devices", "1"], check=True)
    found = designs(options)
    kept = "gpu" if options.device == "cuda" else "gpu-tried"
    for ours, theirs, failed in in_turn(found, device=options.device, folder=options.folder, turns=options.turns):
        plain = statistics.median(theirs)
        rows = [row for name, runs in ours.items() for row in rows_of(name, found[name], runs, plain=plain)]
        rows += [record.Row(name=name, target="it runs", measured="failed", holds=False) for name in sorted(failed)]
        raw = {"plain_seconds": theirs, "plans": {name: [asdict(run) for run in runs] for name, runs in ours.items()}}
        record.keep(kept, rows, raw)
    record.finish(kept, rows, raw)


if __name__ == "__main__":
    main()
