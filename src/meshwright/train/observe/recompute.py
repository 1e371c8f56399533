"""How long a backward pass spends in forwards it runs again: the time of modules called while backward is under way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshwright.train.torch_compat import in_backward


class RecomputeClock:
    """While watching, sums the time of outermost module calls that happen inside a backward pass."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = tuple(parts)
        self._depth = 0
        self._start = 0.0
        self.seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[RecomputeClock]:
        """Hooks every module of the parts until the block ends."""
        modules = [module for part in self._parts for module in part.modules()]
        handles = [module.register_forward_pre_hook(self._enter) for module in modules]
        # Checkpointing leaves a recomputed module by an exception once it has all it needs.
        handles += [module.register_forward_hook(self._leave, always_call=True) for module in modules]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        del module, args
        if not in_backward():
            return
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        if not in_backward() or self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._start
