"""Context: what every mixer of one forward pass shares: who may see whom, the angles, and remembered keys."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.nn.rotary import Angles, angles
from meshwright.spec.model import Rotary


@dataclass(slots=True, kw_only=True)
class Context:
    """One forward pass.

    `documents` (b, s) numbers the document of each position; None means one document a sequence. `memory` keeps
    keys and values by mixer when text is generated step by step, and `start` is then the first new position.
    Masks and angles are made once and shared by all layers of the pass.
    """

    documents: Tensor | None = None
    start: int = 0
    memory: dict[int, tuple[Tensor, Tensor]] | None = None
    _masks: dict[tuple[int | None, int | None, int], Tensor] = field(default_factory=dict)
    _angles: dict[tuple[Rotary, int, torch.dtype], Angles] = field(default_factory=dict)

    def angles(self, rotary: Rotary, x: Tensor) -> Angles:
        """The angles of the positions of x (b, s, ...)."""
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        key = (rotary, x.shape[1], dtype)
        if key not in self._angles:
            stop = self.start + x.shape[1]
            self._angles[key] = angles(rotary, start=self.start, stop=stop, device=x.device, dtype=dtype)
        return self._angles[key]

    def mask(self, length: int, *, window: int | None, chunk: int | None, device: torch.device) -> Tensor | None:
        """Which keys each query sees, bool (1 or b, 1, new, all); None means plain causal."""
        total = self.start + length
        narrow = (window is not None and window < total) or (chunk is not None and chunk < total)
        if self.documents is None and not narrow and (self.start == 0 or length == 1):
            return None
        key = (window, chunk, length)
        if key not in self._masks:
            self._masks[key] = self._build(length, window=window, chunk=chunk, device=device)
        return self._masks[key]

    def _build(self, length: int, *, window: int | None, chunk: int | None, device: torch.device) -> Tensor:
        keys = torch.arange(self.start + length, device=device)
        queries = keys[self.start :, None]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        if chunk is not None:
            seen &= keys // chunk == queries // chunk
        if self.documents is None:
            return seen[None, None]
        same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
        return seen & same[:, :, self.start :]
