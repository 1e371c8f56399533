"""Predicted against measured on this machine: step time and memory of plans of three models, after measurement.

`meshwright cluster measure` runs first. For each model all legal plans are ranked and a spread of them, from the
fastest to the slowest that is predicted under the limit, is trained for some steps through `meshwright train`.
"""

from __future__ import annotations

import argparse
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
from meshwright.spec.job import Constraints, JobSpec
from meshwright.spec.plan import Design

MODELS = {"llama-2m": 256, "llama-5m": 256, "llama-11m": 512}
STEPS = 10
SLOWEST_SECONDS = 8.0
ROOT = Path(__file__).resolve().parent.parent.parent


def designs(name: str, *, sequence_length: int, count: int, cluster: str) -> list[Design]:
    """A spread of legal plans of one model: worlds of 1, 2 and 4, one microbatch size, every kind of parallelism."""
    model, machine = catalog.load_model(name), catalog.load_cluster(cluster, cache=cache_root())
    job = catalog.load_job(str(ROOT / "examples" / "demo.toml"), sets=[f"sequence_length={sequence_length}"])
    job = replace(job, constraints=Constraints(devices="any", fix={"microbatch": 2048 // sequence_length}))
    decision = search.design(model, machine, job, top=10**6)
    usable = [entry for entry in decision.ranked if entry.step_seconds < SLOWEST_SECONDS]
    found = [Design(model=model, cluster=machine, job=without_evaluation(job), plan=entry.plan) for entry in usable]
    runnable = [design for design in found if not search.check(design)]
    return plans.spread(runnable, count)


def told(result: plans.Measured) -> str:
    predicted, seconds = 1e3 * result.predicted_seconds, 1e3 * result.measured_seconds
    time = f"{predicted:8.1f} ms predicted {seconds:8.1f} ms measured {100 * result.error:+6.1f} %"
    return f"{result.model:10} {time}  memory {100 * result.memory_error:+5.1f} %  {result.plan}"


def without_evaluation(job: JobSpec) -> JobSpec:
    return replace(job, evaluation=replace(job.evaluation, every_steps=0, tokens=job.batch_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=6, help="plans of each model")
    parser.add_argument("--cluster", default="local:4")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-prediction")
    parser.add_argument("--no-measure", action="store_true", help="use the calibration that is there")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    if not options.no_measure:
        subprocess.run([plans.COMMAND, "cluster", "measure", "--devices", "4"], check=True)
    measured = []
    for name, length in MODELS.items():
        for index, design in enumerate(
            designs(name, sequence_length=length, count=options.plans, cluster=options.cluster)
        ):
            result = plans.run(design, folder=options.folder / f"{name}-{index}", steps=STEPS)
            measured.append(result)
            print(told(result), flush=True)
    time_error = statistics.mean(abs(entry.error) for entry in measured)
    memory_error = statistics.mean(abs(entry.memory_error) for entry in measured)
    worst_memory = max(abs(entry.memory_error) for entry in measured)
    correlation = plans.rank_correlation(
        [entry.predicted_seconds for entry in measured], [entry.measured_seconds for entry in measured]
    )
    size = f"{len(measured)} plans of {len(MODELS)} models"
    rows = [
        record.Row(
            name=f"step time, mean error over {size}",
            target="<= 12 %",
            measured=f"{100 * time_error:.1f} %",
            holds=time_error <= 0.12,
        ),
        record.Row(
            name="rank correlation of step time",
            target=">= 0.9",
            measured=f"{correlation:.3f}",
            holds=correlation >= 0.9,
        ),
        record.Row(
            name="peak memory allocated by the run, mean error",
            target="<= 5 %",
            measured=f"{100 * memory_error:.1f} % (worst {100 * worst_memory:.1f} %)",
            holds=memory_error <= 0.05,
        ),
    ]
    record.finish("prediction", rows, [asdict(entry) for entry in measured])


if __name__ == "__main__":
    main()
