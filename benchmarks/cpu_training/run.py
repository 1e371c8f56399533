"""tokens/s of `meshwright train` beside a plain hand-written loop, and the plan it picks beside every plan that fits.

The plain loop (plain.py) trains the same model, batch and precision on the same cores, with the microbatch size
that is fastest for it. The two run in turn, several times, and the ratio is of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plans
import record
from meshwright import catalog, search
from meshwright.run.machine import cache_root
from meshwright.spec.job import Constraints
from meshwright.spec.model import Attention, FeedForward
from meshwright.spec.plan import Design

MODEL = "llama-5m"
ROUNDS = 3
STEPS = 14
WARM_UP = 3
WITHIN = 0.05
# Never faster where memory is ample, and left out so that every plan that remains can be measured.
FORBIDDEN = ("recompute=full", "recompute=selective", "schedule=gpipe", "microbatch=1", "microbatch=2", "microbatch=4")
ROOT = Path(__file__).resolve().parent.parent.parent


def plain(design: Design, *, microbatch: int, steps: int) -> float:
    """Median seconds of a step of the plain loop."""
    layer = design.model.layers[0]
    assert isinstance(layer.mixer, Attention)
    assert isinstance(layer.transform, FeedForward)
    sizes = {
        "vocab": design.model.vocab,
        "width": design.model.width,
        "layers": len(design.model.layers),
        "heads": layer.mixer.heads,
        "kv-heads": layer.mixer.kv_heads,
        "hidden": layer.transform.hidden,
        "sequence": design.plan.sequence_length,
        "batch": design.plan.batch,
        "microbatch": microbatch,
        "steps": steps,
        "threads": len(os.sched_getaffinity(0)),
        "precision": design.job.precision.value,
    }
    arguments = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    script = str(Path(__file__).resolve().parent / "plain.py")
    result = subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, text=True)
    return statistics.median(json.loads(result.stdout)["seconds"][WARM_UP:])


def candidates(cluster: str) -> list[Design]:
    """Every plan that fits and runs, fastest predicted first: the first is the one that meshwright picks."""
    model, machine = catalog.load_model(MODEL), catalog.load_cluster(cluster, cache=cache_root())
    job = catalog.load_job(str(ROOT / "examples" / "demo.toml"))
    job = replace(
        job,
        constraints=Constraints(devices="any", forbid=FORBIDDEN),
        data=replace(job.data, document_mask=False),
        evaluation=replace(job.evaluation, every_steps=0, tokens=job.batch_tokens),
    )
    decision = search.design(model, machine, job, top=10**6)
    found = [Design(model=model, cluster=machine, job=job, plan=entry.plan) for entry in decision.ranked]
    return [design for design in found if not search.check(design)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="local:2")
    parser.add_argument("--most", type=int, default=40, help="plans measured at the most, spread over all that fit")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-cpu-training")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    designs = candidates(options.cluster)
    picked, others = designs[0], plans.spread(designs, options.most)
    sizes = [size for size in (4, 8, 16, 32) if picked.plan.batch % size == 0]
    trials = {size: plain(picked, microbatch=size, steps=6) for size in sizes}
    microbatch = min(trials, key=lambda size: trials[size])
    ours, theirs = [], []
    for index in range(ROUNDS):
        theirs.append(plain(picked, microbatch=microbatch, steps=STEPS))
        result = plans.run(picked, folder=options.folder / f"picked-{index}", steps=STEPS)
        ours.append(statistics.median(result.steps[WARM_UP:]))
        print(f"plain {theirs[-1] * 1e3:.0f} ms, meshwright {ours[-1] * 1e3:.0f} ms a step", flush=True)
    ratio = statistics.median(theirs) / statistics.median(ours)
    measured = []
    for index, design in enumerate(others):
        result = plans.run(design, folder=options.folder / f"plan-{index}", steps=8)
        measured.append(result)
        print(f"{result.measured_seconds * 1e3:8.1f} ms  {result.plan}", flush=True)
    fastest = min(entry.measured_seconds for entry in measured)
    mine = next(entry for entry in measured if entry.plan == picked.plan.describe()).measured_seconds
    rows = [
        record.Row(
            name=f"tokens/s of meshwright train over the plain loop ({MODEL}, {ROUNDS} rounds)",
            target=">= 0.97",
            measured=f"{ratio:.3f}",
            holds=ratio >= 0.97,
        ),
        record.Row(
            name=f"the plan picked against the fastest of {len(measured)} measured ({len(designs)} fit)",
            target="within 5 %",
            measured=f"{100 * (mine / fastest - 1):.1f} % slower",
            holds=mine <= fastest * (1 + WITHIN) and len(measured) >= 12,
        ),
    ]
    raw = {
        "picked": picked.plan.describe(),
        "plain_microbatch": microbatch,
        "plain_trials": trials,
        "plain_seconds": theirs,
        "meshwright_seconds": ours,
        "plans": [asdict(entry) for entry in measured],
    }
    record.finish("cpu_training", rows, raw)


if __name__ == "__main__":
    main()
