"""Fingerprints: numbers of 64 bits that tell of every bit that a rank holds or computes, from all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost.holdings import Contents
from meshwright.parallel.clip import local_part
from meshwright.parallel.outer import state_of
from meshwright.train.events import Verified

if TYPE_CHECKING:
    from meshwright.train.run import Run

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A number of 64 bits that changes with every single bit of what this rank keeps of `tensors`."""
    total = 0
    for x in tensors:
        local = local_part(x.detach()).contiguous()
        total += int(local.view(-1).view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64))
    return (total + 2**63) % 2**64 - 2**63


def gathered(own: Sequence[int], *, device: torch.device) -> tuple[tuple[int, ...], ...]:
    """These numbers of every rank, in order. Collective over all of them."""
    mine = torch.tensor(own, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return tuple(tuple(map(int, each.tolist())) for each in everyone)


def verified(run: Run) -> Verified:
    """Of the parameters and buffers of every rank. Collective over all of them."""
    state = state_of(run.design, learners=run.learners, laid=run.laid, contents=Contents.PARAMETERS)
    prints = gathered([fingerprint(state.tensors.values())], device=run.feed.device)
    return Verified(step=run.state.step, prints=tuple(each for (each,) in prints))
