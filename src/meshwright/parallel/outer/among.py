"""A mean over some learners of a group, by messages between neighbours on a ring: the others need not be there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class RingAverage:
    """Summed in `dtype` over places `members` of `group`, one of which this rank has; the same bits on all of them.

    No group is formed for them: learners miss rounds in any company, and a group for each would hold its sockets.
    """

    left: tuple[Tensor, ...] = ()

    def __init__(self, members: Sequence[int], *, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        own = dist.get_rank(group)
        self._group, self._dtype = group, dtype
        self._count, self._place = len(members), members.index(own)
        ranks = [dist.get_global_rank(group, member) for member in members]
        self._before, self._after = ranks[self._place - 1], ranks[(self._place + 1) % self._count]
        self._given: Tensor | None = None

    def start(self, flat: Tensor) -> None:
        assert self._given is None, "one mean at a time"
        self._given = flat

    def advance(self) -> bool:
        """Nothing goes by itself."""
        return False

    def finish(self) -> Tensor:
        """Every part goes around once to be summed and once more to be known (a ring all-reduce)."""
        assert self._given is not None
        given, self._given = self._given, None
        total = given.to(self._dtype)
        parts = list(total.tensor_split(self._count))
        for turn in range(self._count - 1):
            part = parts[(self._place - turn - 1) % self._count]
            part += self._pass_on(parts[(self._place - turn) % self._count], part)
        for turn in range(self._count - 1):
            part = parts[(self._place - turn) % self._count]
            part.copy_(self._pass_on(parts[(self._place - turn + 1) % self._count], part))
        return total.to(given.dtype).div_(self._count)

    def _pass_on(self, part: Tensor, like: Tensor) -> Tensor:
        """`part` is with the next on the ring; what came from the one before, which is as long as `like`."""
        came = torch.empty_like(like)
        # Received first: gloo tells that it waits behind what it sends, and one way would wait for the other.
        both = [(dist.irecv, came, self._before), (dist.isend, part, self._after)]
        messages = [dist.P2POp(op, held, peer, group=self._group) for op, held, peer in both if held.numel()]
        # Together, so that no rank of a ring of accelerators waits with its message for the next one's to be done.
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return came
