"""torch.compile, layer by layer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from torch import nn

from meshwright.parallel.torch_compat import forget_compiled
from meshwright.spec.errors import EnvironmentUnfit, Problem

_COMPILERS = ("c++", "g++", "clang++")


def compile_layers(parts: Sequence[nn.Module]) -> None:
    """Every layer compiles itself at its first pass.

    Raises EnvironmentUnfit when there is no C++ compiler, and where backwards are split.
    """
    if any(getattr(module, "product", None) is not None for part in parts for module in part.modules()):
        raise EnvironmentUnfit(
            Problem(
                what="layers whose backwards are split are not compiled",
                where="job.compile",
                why="a compiled backward is one piece",
                fix='set job.compile = "off", or choose a schedule with whole backwards, such as 1f1b',
            )
        )
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
