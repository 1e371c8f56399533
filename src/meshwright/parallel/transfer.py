"""Transfer: the hops of `cost.routes` over a process group, round by round, through buffers of bounded size.

In a round a process packs what it sends to each peer into one message of bytes and receives one from each. A process
that passes a part on reads it from where it was received, so that nothing is staged longer than its round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.cost.holdings import Box, Holding
from meshwright.cost.routes import Hop
from meshwright.parallel.shards import held_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What all processes hold of one side of a move, and this `process`'s own tensors of it, with the `spares` that it
    keeps for others."""

    held: Mapping[str, Holding]
    tensors: Mapping[str, Tensor]
    process: int
    spares: Mapping[str, Tensor] = field(default_factory=dict)

    def part(self, name: str, box: Box) -> Tensor:
        """This process's memory of `box` of the tensor `name`, which it holds."""
        mine = self.held[name].parts.get(self.process)
        if mine is not None and mine.holds(box):
            local = self.tensors[name]
        else:
            mine, local = self.held[name].spares[self.process], self.spares[name]
        if mine == box:
            return local
        for dim, (start, first, size) in enumerate(zip(box.starts, mine.starts, box.sizes, strict=True)):
            local = local.narrow(dim, start - first, size)
        return local

    def local(self) -> Side:
        """The same, whose tensors are this process's memory alone."""
        tensors, spares = ({name: _local(x) for name, x in side.items()} for side in (self.tensors, self.spares))
        return replace(self, tensors=tensors, spares=spares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Bytes that this process gave to the group and got from it, and those it had already."""

    sent_bytes: int
    received_bytes: int
    copied_bytes: int


def transfer(
    source: Side, target: Side, rounds: Sequence[Sequence[Hop]], *, group: dist.ProcessGroup | None
) -> Counted:
    """This process has its part of every tensor of `target`. Collective over the processes that `rounds` name."""
    with torch.no_grad():
        source, target = source.local(), target.local()
        copied = _keep(source, target)
        sent = received = 0
        device = _wire_device((*source.tensors.values(), *target.tensors.values()))
        for hops in rounds:
            gone, come = _round(source, target, hops, group=group, device=device)
            sent, received = sent + gone, received + come
    return Counted(sent_bytes=sent, received_bytes=received, copied_bytes=copied)


def box_of(x: Tensor) -> Box:
    """The part of a tensor that this process has."""
    local = _local(x)
    return Box(held_start(x) if isinstance(x, DTensor) else (0,) * local.dim(), tuple(local.shape))


def _keep(source: Side, target: Side) -> int:
    """What this process holds already is where it is needed."""
    copied = 0
    for name, wanted in target.held.items():
        mine = wanted.parts.get(target.process)
        if mine is None:
            continue
        for kept in source.held[name].of(source.process):
            met = mine.meet(kept)
            if met is not None:
                target.part(name, met).copy_(source.part(name, met))
                copied += met.elements * wanted.item_bytes
    return copied


def _round(
    source: Side, target: Side, hops: Sequence[Hop], *, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[int, int]:
    """Bytes sent and received by this process in one round."""
    here = source.process
    leaving = _by_peer([(hop.receiver, hop) for hop in hops if hop.sender == here])
    coming = _by_peer([(hop.sender, hop) for hop in hops if hop.receiver == here])
    out = {peer: _pack(source, target, told, device=device) for peer, told in leaving.items()}
    into = {peer: torch.empty(_size(told), dtype=torch.uint8, device=device) for peer, told in coming.items()}
    operations = [dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer) for peer, buffer in into.items()]
    operations += [dist.P2POp(dist.isend, buffer, group=group, group_peer=peer) for peer, buffer in out.items()]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for peer, buffer in into.items():
        _unpack(buffer, source, target, coming[peer])
    return sum(buffer.nbytes for buffer in out.values()), sum(buffer.nbytes for buffer in into.values())


def _by_peer(pairs: Iterable[tuple[int, Hop]]) -> dict[int, list[Hop]]:
    """Hops by peer in ascending order; those of wide items first, so that each lies where its type may."""
    found: dict[int, list[Hop]] = {}
    for peer, hop in sorted(pairs, key=lambda pair: (pair[0], -pair[1].item_bytes)):
        found.setdefault(peer, []).append(hop)
    return found


def _size(hops: Iterable[Hop]) -> int:
    return sum(hop.bytes for hop in hops)


def _pack(source: Side, target: Side, hops: Sequence[Hop], *, device: torch.device) -> Tensor:
    """The parts of `hops` one after another, as bytes in the types that the source keeps them in."""
    buffer = torch.empty(_size(hops), dtype=torch.uint8, device=device)
    for hop, piece in _cut(buffer, source, hops):
        piece.copy_((source if hop.first else target).part(hop.name, hop.box))
    return buffer


def _unpack(buffer: Tensor, source: Side, target: Side, hops: Sequence[Hop]) -> None:
    for hop, piece in _cut(buffer, source, hops):
        target.part(hop.name, hop.box).copy_(piece)


def _cut(buffer: Tensor, source: Side, hops: Sequence[Hop]) -> list[tuple[Hop, Tensor]]:
    """Each hop with its place in a message, in the type and shape of its part."""
    pieces = buffer.split([hop.bytes for hop in hops])
    kinds = [getattr(torch, source.held[hop.name].dtype) for hop in hops]
    return [(hop, piece.view(kind).view(hop.box.sizes)) for hop, piece, kind in zip(hops, pieces, kinds, strict=True)]


def _wire_device(tensors: Iterable[Tensor]) -> torch.device:
    """An accelerator's memory where there is one, since its links reach no other."""
    found = (x.device for x in tensors)
    return next((device for device in found if device.type != "cpu"), torch.device("cpu"))


def _local(x: Tensor) -> Tensor:
    local: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return local.detach()
