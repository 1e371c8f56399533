"""Meshes of a worker that share their process groups: each is formed once, and what torch keeps of one holds for all.

Torch works out how every operator treats every layout of distributed tensors when it first meets it, and finds it again
by any device mesh that looks the same. Meshes that look the same have the same groups here, so that it may.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import device_mesh

from meshwright.parallel import Mesh, build_mesh
from meshwright.parallel import mesh as mesh_room
from meshwright.spec.plan import Design

_MESHES: dict[object, Mesh] = {}
_GROUPS: dict[object, Any] = {}


def mesh_over(design: Design) -> Mesh:
    """One mesh for all plans of the same ranks. Who makes others has torch forget the layouts of these, and the pool
    those of others."""
    plan, copied = design.plan, [heads for heads in design.model.kv_heads if heads < design.plan.tensor]
    ranks = (plan.axes, plan.exchange.inner, plan.experts, plan.tensor_grid, plan.extents, tuple(copied))
    if ranks not in _MESHES:
        with _groups_once():
            _MESHES[ranks] = build_mesh(plan, device_type="cpu", kv_heads=copied)
    return _MESHES[ranks]


@contextmanager
def _groups_once() -> Iterator[None]:
    """Groups made inside for what others were made for, over the same ranks, are those. Nothing is forgotten."""
    make = dist.new_group

    def once(ranks: Sequence[int], *, group_desc: str | None = None, **options: Any) -> Any:
        key = group_desc, tuple(ranks)
        if key not in _GROUPS:
            _GROUPS[key] = make(ranks, group_desc=group_desc, **options)
        return _GROUPS[key]

    with ExitStack() as stack:
        for room in (dist, device_mesh):
            stack.enter_context(mock.patch.object(room, "new_group", once))
        stack.enter_context(mock.patch.object(mesh_room, "forget_layouts"))
        yield
