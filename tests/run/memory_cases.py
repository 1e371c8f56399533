"""What real ranks on gloo hold at the peak of a step, as training measures it; and models large enough to tell."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from meshwright import parallel
from meshwright.spec.plan import AxisName, Design
from meshwright.spec.report import LineName, MemoryPart
from meshwright.train.observe.memory import MemoryTracker
from meshwright.train.observe.profile import Profiler, Sampling
from tests.parallel.move_cases import sequences

FACTOR, LENGTH = 4, 128
_FEATURES = ("width", "hidden", "head_dim", "dims", "query_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
_TOKENS = ("vocab", "positions", "max_positions", "window", "chunk")


def enlarged(design: Design) -> Design:
    """The same plan of a model with FACTOR times the features, visible tokens and vocabulary, over LENGTH tokens."""
    plan = replace(design.plan, sequence_length=LENGTH)
    job = replace(design.job, sequence_length=LENGTH, batch_tokens=plan.batch_tokens)
    job = replace(job, total_tokens=100 * plan.batch_tokens)
    return replace(design, model=_enlarged(design.model), plan=plan, job=job)


def _enlarged(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_enlarged(entry) for entry in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes = {}
    for field in fields(value):
        old = getattr(value, field.name)
        grows = field.name in (*_FEATURES, *_TOKENS) and old is not None
        changes[field.name] = old * FACTOR if grows else _enlarged(old)
    return replace(value, **changes)


def tracked(design: Design) -> tuple[int, dict[str, float]]:
    """This rank's place in the pipeline, and bytes by part at the peak of its second step. Collective.

    What designs before it left in this process, in hooks of parameters that no collector sees, is not of it.
    """
    with MemoryTracker(parts=()).watching() as before:
        left = before.current_bytes
    device = torch.device("cpu")
    sampling = Sampling(memory_step=1, collectives_step=-1)
    profiler = Profiler(design, rank=dist.get_rank(), device=device, sampling=sampling)
    mesh = parallel.build_mesh(design.plan, device_type="cpu")
    laid = parallel.lay(design, mesh, device=device, seed=3, recorder=profiler)
    optimizer = parallel.build_optimizer(laid, design.job.optimizer)
    profiler.watch(parts=laid.parts, optimizer=optimizer)
    rows = design.plan.batch // mesh.data_size
    for number in range(2):
        with profiler.step(number):
            tokens = sequences(mesh.data_coordinate * rows, rows, design)
            laid.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            laid.clip(design.job.optimizer.clip_norm)
            with profiler.section(LineName.OPTIMIZER):
                optimizer.step()
    peak = profiler.sample().memory
    assert peak is not None
    parts = dict(peak.parts)
    parts[MemoryPart.BUFFERS.value] = parts.get(MemoryPart.BUFFERS.value, 0.0) - left
    return mesh.coordinate(AxisName.PIPELINE), parts
