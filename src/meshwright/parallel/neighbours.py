"""Neighbours: ranks that hold the other parts of the same sequences count their choices of experts together."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.nn.context import Context
from meshwright.nn.mixture import MixtureOfExperts
from meshwright.nn.routing import Counted, counted
from meshwright.parallel.collectives import gather_sequence, total
from meshwright.parallel.context import ContextShare


class TensorNeighbours:
    """The tensor ranks among which sequence parallel divides every sequence, in the order of positions."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self.rank, self.parts = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def counted(self, chosen: Tensor, *, experts: int, context: Context) -> Counted:
        """Ranks before this one hold earlier tokens: how often they chose is all that is told."""
        here = counted(chosen, experts=experts)
        every = gather_sequence(here.counts[:, None], self._group)
        before = every[:, : self.rank].sum(dim=1).gather(1, chosen.flatten(1))
        return Counted(places=here.places + before.view_as(chosen), counts=every.sum(dim=1))

    def everywhere(self, counts: Tensor) -> Tensor:
        return total(counts, self._group)

    def joined(self, x: Tensor) -> Tensor:
        """(b, parts * s, ...) of all of them."""
        return gather_sequence(x, self._group)


class ContextNeighbours:
    """The ranks of the context axis, whose tokens lie between each other's, and the tensor ranks among which those of
    each are divided, where they are."""

    def __init__(self, share: ContextShare, *, inside: TensorNeighbours | None) -> None:
        self._share, self._inside = share, inside
        self.parts = share.ranks.size * (1 if inside is None else inside.parts)

    @torch.compiler.disable
    def counted(self, chosen: Tensor, *, experts: int, context: Context) -> Counted:
        """Every rank is told all choices, and puts them in the order of positions."""
        ranks, inside = self._share.ranks, self._inside
        joined = chosen if inside is None else inside.joined(chosen)
        for group in ranks.levels:
            joined = gather_sequence(joined, group)
        places = self._share.places(context).expand(len(joined), -1)
        every = counted(_placed(joined, places), experts=experts)
        first = ranks.rank * (self.parts // ranks.size) + (0 if inside is None else inside.rank)
        own = places[:, first * chosen.shape[1] : (first + 1) * chosen.shape[1]]
        return Counted(places=every.places.gather(1, _wide(own, chosen)), counts=every.counts)

    @torch.compiler.disable
    def everywhere(self, counts: Tensor) -> Tensor:
        counts = counts if self._inside is None else self._inside.everywhere(counts)
        for group in self._share.ranks.levels:
            counts = total(counts, group)
        return counts


def count_together(part: nn.Module, share: ContextShare) -> None:
    """Every mixture under `part` counts choices over all ranks of the context axis."""
    for module in part.modules():
        if isinstance(module, MixtureOfExperts):
            inside = module.neighbours
            assert inside is None or isinstance(inside, TensorNeighbours), "tensor ranks are told first"
            module.neighbours = ContextNeighbours(share, inside=inside)


def _placed(x: Tensor, places: Tensor) -> Tensor:
    """x (b, tokens, k) with each token at its place, of `places` (b, tokens)."""
    return torch.empty_like(x).scatter_(1, _wide(places, x), x)


def _wide(places: Tensor, x: Tensor) -> Tensor:
    return places[..., None].expand(-1, -1, x.shape[2])
