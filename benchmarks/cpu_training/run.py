"""tokens/s of `meshwright train` beside a plain hand-written loop, and the plan it picks beside every plan that fits.

The plain loop (../plain.py) trains the same model, batch and precision on the same cores, with the microbatch size
that is fastest for it. The two run in turn, several times, and the ratio is of medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plans
import record
import yardstick
from meshwright import catalog, search
from meshwright.run.machine import cache_root
from meshwright.spec.job import Constraints
from meshwright.spec.plan import Design

MODEL = "llama-5m"
ROUNDS = 3
STEPS = 14
WITHIN = 0.05
# Never faster where memory is ample, and left out so that every plan that remains can be measured.
FORBIDDEN = ("recompute=full", "recompute=selective", "schedule=gpipe", "microbatch=1", "microbatch=2", "microbatch=4")
ROOT = Path(__file__).resolve().parent.parent.parent


def decide(cluster: str) -> search.Decision:
    """What meshwright decides, with every plan that fits ranked."""
    model, machine = catalog.load_model(MODEL), catalog.load_cluster(cluster, cache=cache_root())
    job = catalog.load_job(str(ROOT / "examples" / "demo.toml"))
    job = replace(
        job,
        constraints=Constraints(devices="any", forbid=FORBIDDEN),
        data=replace(job.data, document_mask=False),
        evaluation=replace(job.evaluation, every_steps=0, tokens=job.batch_tokens),
    )
    return search.design(model, machine, job, top=10**6)


def candidates(decision: search.Decision) -> list[Design]:
    """Every plan that fits and runs, fastest predicted first: the first is the one that predictions alone pick."""
    found = [replace(decision.design, plan=entry.plan) for entry in decision.ranked]
    return [design for design in found if not search.check(design)]


def every(designs: list[Design], *, folder: Path) -> list[plans.Measured]:
    """Each design trained for a few steps, in order."""
    measured = []
    for index, design in enumerate(designs):
        measured.append(plans.run(design, folder=folder / f"plan-{index}", steps=8))
        print(f"{measured[-1].measured_seconds * 1e3:8.1f} ms  {measured[-1].plan}", flush=True)
    return measured


def final(designs: list[Design], *, folder: Path) -> dict[str, float]:
    """Median seconds of a step of each distinct design, run in turn ROUNDS times: the pace of the machine changes."""
    distinct = {design.plan.describe(): design for design in designs}
    seconds: dict[str, list[float]] = {name: [] for name in distinct}
    for turn in range(ROUNDS):
        for index, (name, design) in enumerate(distinct.items()):
            result = plans.run(design, folder=folder / f"final-{turn}-{index}", steps=STEPS)
            seconds[name].append(statistics.median(result.steps[yardstick.WARM_UP :]))
            print(f"final: {seconds[name][-1] * 1e3:8.1f} ms  {name}", flush=True)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="local:2")
    parser.add_argument("--most", type=int, default=40, help="plans measured at the most, spread over all that fit")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-cpu-training")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    decision = decide(options.cluster)
    designs = candidates(decision)
    picked, others = designs[0], plans.spread(designs, options.most)
    sizes = [size for size in (4, 8, 16, 32) if picked.plan.batch % size == 0]
    trials = {size: yardstick.plain(picked, microbatch=size, steps=6).step_seconds for size in sizes}
    microbatch = min(trials, key=lambda size: trials[size])
    ours, theirs = [], []
    for index in range(ROUNDS):
        theirs.append(yardstick.plain(picked, microbatch=microbatch, steps=STEPS).step_seconds)
        result = plans.run(picked, folder=options.folder / f"picked-{index}", steps=STEPS)
        ours.append(statistics.median(result.steps[yardstick.WARM_UP :]))
        print(f"plain {theirs[-1] * 1e3:.0f} ms, meshwright {ours[-1] * 1e3:.0f} ms a step", flush=True)
    ratio = statistics.median(theirs) / statistics.median(ours)
    measured = every(others, folder=options.folder)
    winner = others[min(range(len(others)), key=lambda index: measured[index].measured_seconds)]
    finals = final([picked, winner], folder=options.folder)

    def behind(design: Design) -> float:
        return finals[design.plan.describe()] / min(finals.values()) - 1.0

    rows = [
        record.Row(
            name=f"tokens/s of meshwright train over the plain loop ({MODEL}, {ROUNDS} rounds)",
            target=">= 0.97",
            measured=f"{ratio:.3f}",
            holds=ratio >= 0.97,
        ),
        record.Row(
            name=f"the plan picked against the fastest of {len(measured)} ({len(designs)} fit)",
            target="within 5 %",
            measured=f"{100 * behind(picked):.1f} % slower",
            holds=behind(picked) <= WITHIN and len(measured) >= 12,
        ),
    ]
    raw = {
        "picked": picked.plan.describe(),
        "plain_microbatch": microbatch,
        "plain_trials": trials,
        "plain_seconds": theirs,
        "meshwright_seconds": ours,
        "finals": finals,
        "plans": [asdict(entry) for entry in measured],
    }
    record.finish("cpu_training", rows, raw)


if __name__ == "__main__":
    main()
