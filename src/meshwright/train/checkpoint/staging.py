"""Staging: a copy of a rank's state in the host's memory, from which a checkpoint is written beside training."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.parallel.clip import local_part
from meshwright.train.host_pages import get_pages

_AT_ONCE_BYTES = 16 * 2**20
_IDLE = 4.0  # times as long as a part of the memory took, until the next one is asked for


class Staging:
    """One copy at most. Its memory is kept for the next: to get it anew takes longer than to copy."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._getting: threading.Thread | None = None
        self._enough = threading.Event()

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """From now on memory for a first copy of `tensors` is got beside training, a fifth of the time, until a copy is
        taken. Those of an accelerator are left out."""
        self._kept = {name: torch.empty_like(x) for name, x in tensors.items() if x.device.type == "cpu"}
        room = [local_part(x) for x in self._kept.values()]
        self._getting = threading.Thread(target=self._get, args=(room,), name="staging", daemon=True)
        self._getting.start()

    def end(self) -> None:
        """No memory is got any more beside training."""
        self._enough.set()
        if self._getting is not None:
            self._getting.join()
            self._getting = None

    def _get(self, room: Sequence[Tensor]) -> None:
        for x in room:
            for start in range(0, x.nbytes, _AT_ONCE_BYTES):
                began = time.perf_counter()
                get_pages(x, start=start, stop=start + _AT_ONCE_BYTES)
                if self._enough.wait(_IDLE * (time.perf_counter() - began)):
                    return

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors` as they are now, in the memory of the copy before, which is gone."""
        self.end()
        before, self._kept = self._kept, {}
        with torch.no_grad():
            for name, x in tensors.items():
                kept = before.pop(name, None)
                if kept is not None and _alike(kept, x):
                    local_part(kept).copy_(local_part(x))
                else:
                    del kept
                    kept = x.to("cpu", copy=True)
                self._kept[name] = kept
        return dict(self._kept)


def _alike(kept: Tensor, x: Tensor) -> bool:
    """The same part of a tensor of the same shape and type, and where it is in the same way part of a whole."""
    if isinstance(kept, DTensor) and isinstance(x, DTensor):
        if (kept.device_mesh, kept.placements) != (x.device_mesh, x.placements):
            return False
    elif isinstance(kept, DTensor) or isinstance(x, DTensor):
        return False
    return (kept.shape, kept.dtype) == (x.shape, x.dtype)
