"""Lay a Plan over a module: mesh, tensor, data, pipeline, precision, recompute. Start with apply.py."""

from meshwright.parallel.apply import lay, unfit
from meshwright.parallel.layout import Laid
from meshwright.parallel.mesh import Mesh, build_mesh
from meshwright.parallel.optimizer import build_optimizer

__all__ = ["Laid", "Mesh", "build_mesh", "build_optimizer", "lay", "unfit"]
