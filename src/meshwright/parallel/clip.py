"""The true global gradient norm, in every layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.parallel.copied_heads import places_on
from meshwright.parallel.experts import is_expert
from meshwright.parallel.extents import data_places
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.torch_compat import multiply_all
from meshwright.spec.plan import AxisName


def gradient_norm(parameters: dict[str, nn.Parameter], *, mesh: Mesh, device: torch.device) -> Tensor:
    """The 2-norm of all gradients of the model in fp64, the same on every rank. Collective.

    Every element counts once: a rank counts a parameter's local part only where it stands first on each axis along
    which that part is repeated. `parameters` leaves out copies that another stage counts.
    """
    counted = [
        local_part(parameter.grad)
        for name, parameter in parameters.items()
        if parameter.grad is not None and is_first_copy(name, parameter, mesh)
    ]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        total += _norm(counted).double().square()
    if mesh.everyone is not None:
        dist.all_reduce(total, group=mesh.everyone)
    return total.sqrt()


def clip_gradients(parameters: Iterable[nn.Parameter], *, norm: Tensor, max_norm: float) -> None:
    """Gradients of norm `norm` have at most `max_norm`."""
    if float(norm) > max_norm:
        scale_gradients(parameters, max_norm / float(norm))


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Gradients are `factor` times what they were."""
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        multiply_all(gradients, factor)


def _norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all of them, summed in no less than fp32."""
    if gradients[0].dtype is not torch.bfloat16:
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def local_part(x: Tensor) -> Tensor:
    """What this rank keeps of x."""
    return x.to_local() if isinstance(x, DTensor) else x


def is_first_copy(name: str, parameter: Tensor, mesh: Mesh) -> bool:
    """This rank stands first on each axis along which `parameter` is repeated."""
    divided, extent = set[str](), dict[str, int]()
    of_tensor = mesh.tensor_places
    if isinstance(parameter, DTensor):
        of_tensor = places_on(parameter.device_mesh, of_tensor)
        names = parameter.device_mesh.mesh_dim_names or ()
        divided = {name for name, place in zip(names, parameter.placements, strict=True) if not place.is_replicate()}
        extent = data_places(parameter.device_mesh, data=mesh.data_coordinate)
    if AxisName.SHARD.value in divided:
        divided.add(AxisName.CONTEXT.value)  # one dim of the mesh
    axes = (AxisName.REPLICATE, AxisName.SHARD, AxisName.CONTEXT)
    places = (extent or {axis.value: mesh.coordinate(axis) for axis in axes}) | of_tensor
    if mesh.experts is not None and is_expert(name):
        places = mesh.experts.places
    return all(axis in divided or place == 0 for axis, place in places.items())
