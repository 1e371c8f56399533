"""What finding stable ranks takes beside training: processor seconds of both, one process, one thread.

`python benchmarks/low_rank/tracking.py` holds that it is less than a hundredth.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from meshwright import api
from meshwright.cost.holdings import Contents
from meshwright.parallel import build_mesh, build_optimizer, lay, relocate
from meshwright.parallel.stable_rank import stable_ranks
from meshwright.spec.cluster import Precision
from meshwright.spec.job import JobSpec
from meshwright.spec.low_rank import Cuttlefish, steps_of
from meshwright.spec.plan import Design
from meshwright.spec.ranks import factorable

CASES = (("llama-5m", 512, 1_000), ("llama-26m", 2_048, 10_000))


def main() -> None:
    torch.set_num_threads(1)
    rows, raw = [], dict[str, Any]()
    for model, tokens, steps in CASES:
        raw[model] = found = tracked(model, batch_tokens=tokens, total_steps=steps)
        rows.append(
            record.Row(
                name=f"{model}: finding ranks in {steps:,} steps of {tokens:,} tokens, of the processor's seconds",
                target="1 %",
                measured=f"{found['share']:.2%}",
                holds=found["share"] <= 0.01,
            )
        )
    record.finish("low-rank-tracking", rows, raw)


def tracked(model: str, *, batch_tokens: int, total_steps: int) -> dict[str, float]:
    """Processor seconds of a step and of a search, and the share of a run's that all its searches take."""
    total_tokens = batch_tokens * total_steps
    job = JobSpec(precision=Precision.FP32, sequence_length=64, batch_tokens=batch_tokens, total_tokens=total_tokens)
    found = api.design(model, "local:1", job).design
    step, first, later = measured(found, batch_tokens=batch_tokens)
    every = steps_of(Cuttlefish().interval, total_steps=total_steps)
    share = (first + later * (total_steps // every)) / (step * total_steps)
    return {"step_seconds": step, "first_seconds": first, "later_seconds": later, "share": share}


def measured(design: Design, *, batch_tokens: int) -> tuple[float, float, float]:
    """Processor seconds of a step, of the first search and of a later one, medians."""
    laid = lay(design, build_mesh(design.plan, device_type="cpu"), device="cpu", seed=1)
    optimizer = build_optimizer(laid, design.job.optimizer)
    rows = torch.randint(0, design.model.vocab, (batch_tokens // 64, 65))

    def step() -> None:
        laid.step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        laid.clip(1.0)
        optimizer.step()

    layers = enumerate(design.model.layers)
    names = tuple(f"layers.{index}.{name}.weight" for index, layer in layers for name in factorable(layer.places))
    vectors: dict[str, torch.Tensor] = {}

    def search() -> None:
        state = relocate.state_of(design, laid=laid, contents=Contents.PARAMETERS)
        ranks = stable_ranks(names, state, starts=vectors, group=None, device=laid.device)
        vectors.update({name: one.vector for name, one in ranks.items()})

    steps = [spent(step) for _ in range(5)]
    first, *later = (spent(search) for _ in range(4))
    return statistics.median(steps), first, statistics.median(later)


def spent(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
