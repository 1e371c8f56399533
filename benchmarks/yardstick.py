"""The plain loop of plain.py beside a design: the same model, batch and precision, in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec.model import Attention, FeedForward
from meshwright.spec.plan import Design

WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What a plain loop took: the median of its steps after the first, all of them, and what an accelerator gave it."""

    step_seconds: float
    steps: tuple[float, ...]
    allocated_bytes: int


def plain(design: Design, *, microbatch: int, steps: int, device: str = "cpu", compiled: bool = False) -> Plain:
    """`steps` steps of the plain loop; raises CalledProcessError where it fails, out of memory for one."""
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
        "precision": "fp32" if design.job.precision.value == "fp32" else "bf16",
        "device": device,
    }
    arguments = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    head = design.model.head
    arguments += ["--tied"] * (head is not None and head.tied) + ["--compile"] * compiled
    script = str(Path(__file__).resolve().parent / "plain.py")
    result = subprocess.run([sys.executable, script, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    told = json.loads(result.stdout)
    seconds = told["seconds"]
    return Plain(
        step_seconds=statistics.median(seconds[WARM_UP:]),
        steps=tuple(seconds),
        allocated_bytes=told["allocated_bytes"],
    )
