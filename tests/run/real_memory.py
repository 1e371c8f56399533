"""What real ranks on gloo hold at the peak of a step, as training measures it; and models large enough to tell."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from meshwright import parallel
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName
from meshwright.train.observe.profile import Profiler, Sampling
from tests.parallel.move_cases import sequences

_GROWS = frozenset(
    "width hidden head_dim dims vocab positions max_positions window chunk query_rank kv_rank nope_dim rope_dim "
    "value_dim".split()
)


def enlarged(model: ModelSpec, factor: int) -> ModelSpec:
    """The same model with `factor` times the features, the tokens that a mask shows and the vocabulary."""
    found: ModelSpec = _enlarged(model, factor)
    return found


def _enlarged(value: Any, factor: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_enlarged(entry, factor) for entry in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes = {}
    for field in fields(value):
        old = getattr(value, field.name)
        if field.name in _GROWS and old is not None:
            changes[field.name] = old * factor
        else:
            changes[field.name] = _enlarged(old, factor)
    return replace(value, **changes)


def tracked(design: Design) -> tuple[int, dict[str, float]]:
    """This rank's pipeline coordinate, and bytes by part at the peak of its second step. Collective."""
    import torch.distributed as dist

    rank, device = dist.get_rank(), torch.device("cpu")
    profiler = Profiler(design, rank=rank, device=device, sampling=Sampling(memory_step=1, collectives_step=-1))
    mesh = parallel.build_mesh(design.plan, device_type="cpu")
    laid = parallel.lay(design, mesh, device=device, seed=3, recorder=profiler)
    optimizer = parallel.build_optimizer(laid, design.job.optimizer)
    profiler.watch(parts=laid.parts, optimizer=optimizer)
    for number in range(2):
        rows = design.plan.batch // mesh.data_size
        with profiler.step(number):
            tokens = sequences(mesh.data_coordinate * rows, rows, design)
            laid.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            laid.clip(design.job.optimizer.clip_norm)
            with profiler.section(LineName.OPTIMIZER):
                optimizer.step()
    memory = profiler.sample().memory
    assert memory is not None
    from meshwright.spec.plan import AxisName

    return mesh.coordinate(AxisName.PIPELINE), dict(memory.parts)
