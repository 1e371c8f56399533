"""Recompute: what a layer does not keep for backward and computes again (2205.05198)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.nn.attention import AttentionCore
from meshwright.nn.decoder import DecoderLayer
from meshwright.spec.plan import Recompute


class RecomputedCore(nn.Module):
    """An attention core that keeps its queries, keys and values and nothing between them and its output."""

    def __init__(self, core: AttentionCore) -> None:
        super().__init__()
        self.core = core

    def forward(self, *args: Any) -> Tensor:
        return _again(self.core, *args)


def apply_recompute(layer: DecoderLayer, kind: Recompute) -> None:
    """`layer` keeps all activations, all but those inside its attention core, or its input alone."""
    if kind is Recompute.FULL:
        layer.around = _again
    elif kind is Recompute.SELECTIVE:
        core = getattr(layer.mixer, "core", None)
        if isinstance(core, AttentionCore) and layer.mixer is not None:
            layer.mixer.core = RecomputedCore(core)


def _again(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Nothing here draws random numbers, so their state is not kept."""
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result
