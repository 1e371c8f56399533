"""What workers do in the tests of narrow AdamW: steps by gradients that are given, in the layout of a plan."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.nn import Decoder
from meshwright.parallel import build_optimizer, lay
from meshwright.parallel.clip import local_part
from meshwright.parallel.shards import held_part
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import AxisName, Design
from tests.parallel.parity_cases import SEED
from tests.support.meshes import mesh_over

STEPS = 3


def given(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The gradient of a parameter in a step: magnitudes of many sizes, the same for every layout."""
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    wide = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
    return wide.to(torch.bfloat16).float()


def laid_steps(design: Design) -> tuple[dict[str, Any], dict[str, int]]:
    """Parameters, gathered whole, after STEPS steps by `given`, of the first ranks; bytes of what this rank keeps."""
    mesh = mesh_over(design)
    laid = lay(design, mesh, device="cpu", seed=SEED)
    optimizer = build_optimizer(laid, design.job.optimizer)
    for step in range(STEPS):
        for name, parameter in laid.named_parameters():
            whole = given(name, tuple(parameter.shape), step)
            own = held_part(whole, parameter) if isinstance(parameter, DTensor) else whole
            own = own.to(parameter.dtype).contiguous()
            if isinstance(parameter, DTensor):
                own = DTensor.from_local(
                    own,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = own
        optimizer.step()
    found: dict[str, numpy.ndarray] = {}
    for name, parameter in laid.named_parameters():
        whole = parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        found[name] = whole.double().numpy()
    kept = {
        "optimizer": sum(x.nbytes for state in optimizer.state.values() for n, x in state.items() if n != "step"),
        "parameters": sum(local_part(p.detach()).nbytes for _, p in laid.named_parameters()),
    }
    first = all(mesh.coordinate(axis) == 0 for axis in (AxisName.REPLICATE, AxisName.SHARD, AxisName.TENSOR))
    return found if first else {}, kept


def shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Decoder(model).named_parameters()}
