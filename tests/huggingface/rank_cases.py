"""What workers do in the tests of weights that a run begins with."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.cost.holdings import Contents
from meshwright.parallel import build_mesh, lay, relocate
from meshwright.spec.plan import Design
from meshwright.train.checkpoint import Store


def begun(design: Design, run_dir: str, start: str | None) -> dict[str, Tensor]:
    """The whole parameters after this rank's part was read: from the folder `start`, or the run's checkpoint."""
    mesh = build_mesh(design.plan, device_type="cpu", kv_heads=design.model.kv_heads)
    laid = lay(design, mesh, device="cpu", seed=7)
    target = relocate.state_of(design, laid=laid, contents=Contents.PARAMETERS)
    store = Store(Path(run_dir) / "checkpoints", design=design)
    if start is not None:
        store.start(Path(start), target)
    else:
        assert store.newest(lambda found: store.load(found, target)) is not None
    store.close()
    state = {name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in target.tensors.items()}
    gathered: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, state)
    return {name: value.to(torch.float64) for part in gathered for name, value in part.items()}


def kept(design: Design, run_dir: str, start: str) -> None:
    """A checkpoint of step 1 has the weights of the folder `start`, each rank's part of them."""
    laid = lay(design, build_mesh(design.plan, device_type="cpu", kv_heads=design.model.kv_heads), device="cpu", seed=7)
    target = relocate.state_of(design, laid=laid, contents=Contents.PARAMETERS)
    store = Store(Path(run_dir) / "checkpoints", design=design)
    store.start(Path(start), target)
    store.save(target, step=1, progress={})
    store.close()
