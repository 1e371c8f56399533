"""Predicted against published step times of A100 clusters, with nothing measured or fitted: data sheets and formulas.

runs.csv holds 283 runs of four sources as they were published: 2104.04473 table 1 (achieved FLOP/s turned into
seconds by the paper's own formula), 2205.05198 table 5, vTrain's multi-node ground truth and the runs of 2311.05610
that did not fail. Stages are even where a source does not say; the software is Megatron-LM's of the time.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record
from meshwright import catalog, cost
from meshwright.catalog.decoders.shapes import GptStyle, LlamaStyle
from meshwright.cost.predict import UNMEASURED_ERROR
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
)

Run = dict[str, str]
RUNS = Path(__file__).resolve().parent / "runs.csv"


def seconds(run: Run) -> float:
    """The published seconds of a step."""
    if run["iter_s"]:
        return float(run["iter_s"])
    layers, width, vocab, sequence, batch = (float(run[key]) for key in ("layers", "hidden", "vocab", "seq", "gbs"))
    flops = 96.0 * batch * sequence * layers * width**2
    flops *= 1.0 + sequence / (6.0 * width) + vocab / (16.0 * layers * width)
    return flops / (float(run["tflops_gpu"]) * 1e12 * float(run["n_gpus"]))


def model(run: Run) -> ModelSpec:
    sizes = {"layers": int(run["layers"]), "width": int(run["hidden"]), "heads": int(run["heads"])}
    sizes |= {"vocab": int(run["vocab"]), "hidden": int(run["ffn"])}
    if run["arch"] == "llama":
        return LlamaStyle(name="published", max_positions=int(run["seq"]), **sizes).build()
    return GptStyle(name="published", positions=int(run["seq"]), **sizes).build()


def cluster(run: Run) -> ClusterSpec:
    """DGX A100 nodes; the bandwidth that leaves a node as published where it was."""
    found = catalog.load_cluster(f"selene:{8 * math.ceil(int(run['n_gpus']) / 8)}")
    if not run["inter_gbit_per_node"]:
        return found
    group = found.groups[0]
    nic = replace(group.nic, bandwidth=float(run["inter_gbit_per_node"]) * 1e9 / 8 / group.nics)
    return replace(found, groups=(replace(group, nic=nic),))


def bounds(layers: int, stages: int) -> list[int]:
    """Layers as equal as can be over the stages, embedding first and head last."""
    found = [0]
    for stage in range(stages):
        held = layers // stages + (stage < layers % stages)
        found.append(found[-1] + held + (stage == 0) + (stage == stages - 1))
    return found


def design(run: Run) -> Design:
    tensor, pipeline, data = int(run["tp"]), int(run["pp"]), int(run["dp"])
    chunks, microbatch, sequence = int(run["vpp"] or 1), int(run["mbs"]), int(run["seq"])
    edges = bounds(int(run["layers"]), pipeline * chunks)
    sharded = run["zero"] == "1" and data > 1
    precision = Precision(run["precision"] or "fp16")
    spec, machines = model(run), cluster(run)
    stages = tuple(
        Stage(
            rank=index % pipeline,
            groups=(
                BlockGroup(
                    start=edges[index],
                    stop=edges[index + 1],
                    tensor=tensor,
                    sequence_parallel=run["sp"] == "yes",
                    sharding=Sharding.OPTIMIZER if sharded else Sharding.NONE,
                    recompute=Recompute(run["recompute"]),
                    precision=precision,
                ),
            ),
        )
        for index in range(pipeline * chunks)
    )
    sizes = {AxisName.PIPELINE: pipeline, AxisName.REPLICATE: 1 if sharded else data}
    sizes |= {AxisName.SHARD: data if sharded else 1, AxisName.TENSOR: tensor}
    plan = Plan(
        model=spec.name,
        cluster=machines.name,
        axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()),
        stages=stages,
        schedule=Schedule(
            kind=ScheduleKind.INTERLEAVED if chunks > 1 else ScheduleKind.ONE_F_ONE_B,
            microbatches=int(run["gbs"]) // (data * microbatch),
            chunks=chunks,
        ),
        sequence_length=sequence,
        microbatch=microbatch,
    )
    job = JobSpec(
        sequence_length=sequence,
        batch_tokens=plan.batch_tokens,
        precision=precision,
        data=DataSpec(document_mask=False),
        software="megatron-flash" if run["flash"] == "yes" else "megatron-2021",
    )
    return Design(model=spec, cluster=machines, job=job, plan=plan)


def main() -> None:
    with RUNS.open(newline="") as file:
        runs = list(csv.DictReader(file))
    errors: dict[str, list[float]] = defaultdict(list)
    raw = []
    for index, run in enumerate(runs):
        predicted, measured = cost.predict(design(run)).step_seconds, seconds(run)
        errors[run["source"]].append(math.log(predicted / measured))
        raw.append({"source": run["source"], "row": index + 2, "predicted": predicted, "published": measured})
    rows = []
    for source, logs in errors.items():
        mean = sum(abs(math.expm1(error)) for error in logs) / len(logs)
        worst = max(abs(math.expm1(error)) for error in logs)
        rows.append(
            record.Row(
                name=f"{source}, {len(logs)} runs: mean error of the step",
                target="none yet",
                measured=f"{100 * mean:.1f} % (worst {100 * worst:.1f} %)",
                holds=True,
            )
        )
    every = [error for logs in errors.values() for error in logs]
    rms = math.sqrt(sum(error**2 for error in every) / len(every))
    rows.append(
        record.Row(
            name=f"root mean square of log(predicted / published), {len(every)} runs",
            target=f"<= {UNMEASURED_ERROR} (the band of clusters that were not measured)",
            measured=f"{rms:.3f}",
            holds=rms <= UNMEASURED_ERROR,
        )
    )
    record.finish("published", rows, raw)


if __name__ == "__main__":
    main()
