"""What takes the place of FSDP2's own reduce-scatter: exchanges and local sums, in full or in eight bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.compress import Rounding


class ExchangeReduceScatter:
    """Reduce-scatter as all-to-all and a local sum: gloo's own moves twice the bytes (plugs into FSDP2)."""

    def allocate(self, size: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "gradients are summed, never averaged"
        torch.sum(self._received(input_tensor, group, output_tensor.dtype), dim=0, out=output_tensor.view(-1))

    def _received(self, given: Tensor, group: dist.ProcessGroup, _dtype: torch.dtype) -> Tensor:
        """This rank's part of what every rank gave, (ranks, elements)."""
        return _exchanged(given.view(group.size(), -1), group)


class CompressedReduceScatter(ExchangeReduceScatter):
    """FSDP2's reduce-scatter in eight bits: one object for each group of parameters (its protocol's two methods)."""

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding

    def _received(self, given: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
        assert given.numel() == self.rounding.left.numel(), "one object reduces one group of parameters"
        return self.rounding.unpack(_exchanged(self.rounding.pack(given.view(-1)), group), dtype)


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
