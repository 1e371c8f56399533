"""torch.compile, layer by layer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from torch import nn

from meshwright.parallel.torch_compat import forget_compiled
from meshwright.schedule import planned
from meshwright.spec.errors import EnvironmentUnfit, Problem
from meshwright.spec.plan import Plan, TensorGrid

_COMPILERS = ("c++", "g++", "clang++")


def uncompiled(plan: Plan) -> str:
    """Why layers under `plan` run as they are written; nothing where they may compile (rule runtime-compile)."""
    if plan.pipeline > 1 and planned.splits(plan.schedule):
        return f"{plan.schedule.kind.value} splits backwards"
    if plan.tensor_grid is not TensorGrid.LINE:
        return f"products over a {plan.tensor_grid.value} of tensor ranks are no graph"
    return f"{plan.schedule.kind.value} passes keys and values between slices" if plan.schedule.slices > 1 else ""


def compile_layers(parts: Sequence[nn.Module]) -> None:
    """Every layer compiles itself at its first pass. Raises EnvironmentUnfit when there is no C++ compiler."""
    if not any(shutil.which(name) for name in _COMPILERS):
        raise EnvironmentUnfit(
            Problem(
                what="no C++ compiler is found",
                where="job.compile",
                why="torch.compile builds its kernels with one",
                fix='install g++, or set job.compile = "off"',
            )
        )
    for part in parts:
        for layer in _layers(part):
            layer.compile()


def uncompile_layers(parts: Sequence[nn.Module]) -> None:
    """Every layer runs again as it was written."""
    for part in parts:
        for layer in _layers(part):
            forget_compiled(layer)


def _layers(part: nn.Module) -> list[nn.Module]:
    return list(part.get_submodule("layers").children())
