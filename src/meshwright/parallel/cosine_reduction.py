"""Of every chunk of a bucket the largest coefficients of its cosine transform, gathered from all ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.parallel.gathering import Gathering
from meshwright.spec.compression import DeMo


class DeMoReduction:
    """Decoupled momentum (2411.19870) over chunks of elements that lie side by side: what a rank owes fades by a decay,
    takes this step's gradient, and is left without the coefficients that go to every rank; all add them up in the order
    of the ranks. A coefficient travels as its number and a byte of place. The optimizer's own step follows."""

    def __init__(self, like: Tensor, *, group: dist.ProcessGroup, spec: DeMo) -> None:
        self._gathering, self._spec = Gathering(group), spec
        self._chunks = -(-like.numel() // spec.chunk)
        self._left = torch.zeros_like(like)
        self._basis = cosines(spec.chunk).to(like)

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self._left,)

    def start(self, flat: Tensor, *, step: int) -> None:
        self._left.mul_(self._spec.decay).add_(flat)
        whole = self._chunks * self._spec.chunk
        spectrum = functional.pad(self._left, (0, whole - flat.numel())).view(self._chunks, -1) @ self._basis.T
        places = spectrum.abs().topk(self._spec.largest, dim=1, sorted=False).indices
        values = spectrum.gather(1, places)
        self._left.sub_(self._back(torch.zeros_like(spectrum).scatter_(1, places, values), flat.numel()))
        self._gathering.start(torch.cat((values.view(torch.uint8), places.to(torch.uint8)), dim=1).view(-1))

    def turn(self) -> None:
        """Nothing: what was sent is all."""

    def finish(self, flat: Tensor) -> None:
        spectrum = flat.new_zeros(self._chunks, self._spec.chunk)
        split = self._spec.largest * flat.element_size()
        for packed in self._gathering.finish().unflatten(1, (self._chunks, -1)):
            # Places of one rank differ, so that its additions commute; ranks come in one order everywhere.
            values = packed[:, :split].contiguous().view(flat.dtype)
            spectrum.scatter_add_(1, packed[:, split:].long(), values)
        flat.copy_(self._back(spectrum, flat.numel()))

    def _back(self, spectrum: Tensor, elements: int) -> Tensor:
        """The elements that coefficients (chunks, chunk) stand for, shape (elements,)."""
        return (spectrum @ self._basis).view(-1)[:elements]


def cosines(size: int) -> Tensor:
    """The orthonormal cosine transform (DCT-II) of `size` numbers, shape (size, size), a coefficient a row, fp64."""
    places = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * places[:, None] * (places + 0.5)) * math.sqrt(2.0 / size)
    basis[0] /= math.sqrt(2.0)
    return basis
