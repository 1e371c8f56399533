"""Numbers of tensor ranks that divide a module, near one that does not."""

from __future__ import annotations

from torch import nn

from meshwright.parallel.rules import derive
from meshwright.parallel.trace import Example
from meshwright.spec.errors import ConfigError

_MOST_TRIED = 8  # other numbers of ranks, where one divides nothing


def nearest_divisions(module: nn.Module, example: Example, *, tensor: int) -> tuple[int, ...]:
    """The numbers of ranks nearest to `tensor` that divide any matrix of `module`; 1 where none of a few does."""
    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    tried = 0
    for apart in range(1, tensor):
        near = [ranks for ranks in (tensor - apart, tensor + apart) if any(size % ranks == 0 for size in sizes)]
        found = tuple(ranks for ranks in near if ranks > 1 and _divides(module, example, tensor=ranks))
        tried += len(near)
        if found or tried > _MOST_TRIED:
            return found or (1,)
    return (1,)


def _divides(module: nn.Module, example: Example, *, tensor: int) -> bool:
    try:
        return bool(derive(module, example, tensor=tensor).divided)
    except ConfigError:
        return False
