"""Copies: the state of the newest two steps at which it was copied, in memory, with what a neighbour alone has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost.copies import SLOTS, Neighbours, alone, copied
from meshwright.cost.holdings import Box, Holding
from meshwright.parallel.clip import local_part
from meshwright.parallel.relocate import STAGING_BYTES
from meshwright.spec.plan import Design

_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The state after `step` as one rank had it, and the `spares` that it keeps of its neighbour; `number` counts
    the copies of a run since its ranks changed last. `progress` is where the run stood, the same on every rank."""

    number: int
    step: int
    progress: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    spares: Mapping[str, Tensor]


class Copies:
    """What this rank keeps of a run of `design`. Ranks take copies together, so that no two differ by more than one:
    one that all of them have is always whole. `group` is all ranks, who keep of each other what one has alone; None is
    one rank, or learners, who do not. `held` is what a copy of all has, where it is known.
    """

    def __init__(
        self,
        design: Design,
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        held: Mapping[str, Holding] | None = None,
    ) -> None:
        held, near = copied(design) if held is None else held, Neighbours.of(design)
        own = {name: one.parts[rank] for name, one in held.items() if rank in one.parts}
        sent = alone(held, rank, together=near.together) if group is not None else {}
        rest = {name: box for name, box in own.items() if name not in sent}
        self._group, self._after, self._before = group, near.keeper[rank], near.kept_by(rank)
        kept = alone(held, self._before, together=near.together) if group is not None else {}
        self._slots = [_Slot(_Part(sent, held), _Part(rest, held), _Part(kept, held)) for _ in range(SLOTS)]
        self._taken = 0

    @property
    def whole(self) -> tuple[Copy, ...]:
        """Every copy that can be gone on from, the newest first."""
        found = (slot.copy for slot in self._slots)
        return tuple(sorted((copy for copy in found if copy is not None), key=lambda copy: -copy.number))

    def take(self, tensors: Mapping[str, Tensor], *, step: int, progress: Mapping[str, Any]) -> None:
        """There is a copy of the state of a run after `step`, by name, in the place of the one before the last.

        Collective. One that another rank's end cuts short does not count, and the last one stays.
        """
        number = self._taken + 1
        slot = self._slots[number % SLOTS]
        slot.copy = None
        with torch.no_grad():
            for part in (slot.sent, slot.rest):
                for name, place in part.tensors.items():
                    place.copy_(local_part(tensors[name]))
        self._exchange(slot)
        own = {**slot.sent.tensors, **slot.rest.tensors}
        slot.copy = Copy(number=number, step=step, progress=progress, tensors=own, spares=slot.kept.tensors)
        self._taken = number

    def _exchange(self, slot: _Slot) -> None:
        """Each rank has what the one that it keeps for has alone."""
        out, into = slot.sent.memory, slot.kept.memory
        for first in range(0, max(out.numel(), into.numel()), STAGING_BYTES):
            leaving, coming = (memory[first : first + STAGING_BYTES] for memory in (out, into))
            operations = []
            if coming.numel():
                operations.append(dist.P2POp(dist.irecv, coming, group=self._group, group_peer=self._before))
            if leaving.numel():
                operations.append(dist.P2POp(dist.isend, leaving, group=self._group, group_peer=self._after))
            for work in dist.batch_isend_irecv(operations):
                work.wait()


class _Part:
    """Memory of the host for some boxes of tensors, one after another: `tensors` by name, and as `memory` in bytes."""

    def __init__(self, boxes: Mapping[str, Box], held: Mapping[str, Holding]) -> None:
        sizes = {name: box.elements * held[name].item_bytes for name, box in boxes.items()}
        ends, end = dict[str, int](), 0
        for name, size in sizes.items():
            end = -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES + size
            ends[name] = end
        self.memory = torch.empty(end, dtype=torch.uint8)
        self.tensors = {
            name: self.memory[ends[name] - sizes[name] : ends[name]]
            .view(getattr(torch, held[name].dtype))
            .view(boxes[name].sizes)
            for name in boxes
        }


@dataclass(slots=True)
class _Slot:
    """Room for one copy: what this rank alone has, the rest of its own, and what it keeps of its neighbour."""

    sent: _Part
    rest: _Part
    kept: _Part
    copy: Copy | None = None
