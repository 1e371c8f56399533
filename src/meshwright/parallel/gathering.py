"""Bytes of every rank on their way to all of them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.torch_compat import all_gather_single


class Gathering:
    """One all-gather of flat bytes, as many on every rank, under way from `start` to `finish`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent: Tensor | None = None
        self._everyone: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, packed: Tensor) -> None:
        """Sets `packed` (bytes,) out."""
        self._sent = packed.unsqueeze(0)
        self._everyone = packed.new_empty(self._group.size(), len(packed))
        self._work = all_gather_single(self._everyone, self._sent, group=self._group, async_op=True)

    def finish(self) -> Tensor:
        """What all ranks have sent, (ranks, bytes), in their order."""
        assert self._everyone is not None
        assert self._work is not None
        self._work.wait()
        everyone = self._everyone
        self._sent = self._everyone = self._work = None
        return everyone
