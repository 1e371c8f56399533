"""Sums over some learners of a group, by messages between them: the others need not be there.

No group is formed for them: learners miss rounds in any company, and a group for each would hold its sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.compress import CompressedReduction, Rounding
from meshwright.parallel.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Some:
    """So many places of `group`, by their ranks, of which this rank is at `place` among them and `whole` in all."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    place: int
    whole: int

    @classmethod
    def of(cls, members: Sequence[int], *, group: dist.ProcessGroup) -> Some | None:
        """None where they are all."""
        if len(members) == group.size():
            return None
        own = dist.get_rank(group)
        ranks = tuple(dist.get_global_rank(group, member) for member in members)
        return cls(group=group, ranks=ranks, place=list(members).index(own), whole=own)

    @property
    def count(self) -> int:
        return len(self.ranks)

    def add_up(self, total: Tensor) -> None:
        """`total` is the sum over all of them, the same bits on each: every part goes around a ring once to be summed
        and once more to be known."""
        parts = list(total.tensor_split(self.count))
        for turn in range(self.count - 1):
            part = parts[(self.place - turn - 1) % self.count]
            part += self._passed_on(parts[(self.place - turn) % self.count], part)
        for turn in range(self.count - 1):
            part = parts[(self.place - turn) % self.count]
            part.copy_(self._passed_on(parts[(self.place - turn + 1) % self.count], part))

    def traded(self, rows: Tensor) -> Tensor:
        """Row i of what comes is the one that member i has for this one, of `rows` (members, n)."""
        came = torch.empty_like(rows)
        came[self.place].copy_(rows[self.place])
        self._exchange((rank, rows[place], came[place]) for place, rank in self._others())
        return came

    def gathered(self, row: Tensor) -> Tensor:
        """(members, n): what each of them gave, of which `row` (n,) is this one's."""
        came = row.new_empty(self.count, row.numel())
        came[self.place].copy_(row)
        self._exchange((rank, row, came[place]) for place, rank in self._others())
        return came

    def _others(self) -> Iterator[tuple[int, int]]:
        return ((place, rank) for place, rank in enumerate(self.ranks) if place != self.place)

    def _passed_on(self, part: Tensor, like: Tensor) -> Tensor:
        """`part` is with the next on the ring; what came from the one before, which is as long as `like`."""
        came = torch.empty_like(like)
        before, after = self.ranks[self.place - 1], self.ranks[(self.place + 1) % self.count]
        self._send([(dist.irecv, came, before), (dist.isend, part, after)])
        return came

    def _exchange(self, pairs: Iterator[tuple[int, Tensor, Tensor]]) -> None:
        """With each (rank, what it is given, where what it gives is put)."""
        held = list(pairs)
        received = [(dist.irecv, came, rank) for rank, _, came in held]
        self._send([*received, *((dist.isend, given, rank) for rank, given, _ in held)])

    def _send(self, told: Sequence[tuple[Callable[..., object], Tensor, int]]) -> None:
        """Received first: gloo tells that it waits behind what it sends, and one way would wait for the other."""
        messages = [dist.P2POp(op, held, peer, group=self.group) for op, held, peer in told if held.numel()]
        # Together, so that no rank of a ring of accelerators waits with its message for the next one's to be done.
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()


def rounded_mean(flat: Tensor, some: Some, *, reduction: CompressedReduction, wire: Wire) -> Tensor:
    """The mean over `some` of what each gives, in the numbers of `wire`, the same bits on each of them.

    What rounding leaves is laid by in `reduction`, which sums over all: of what this rank sends, and with it of the sum
    that it makes for the others, which it sends the next time. It is kept as it counts where all meet, so that whoever
    meets then, what was left of a mean is added to a mean. Who is alone sends nothing, and has nothing rounded.
    """
    share, size = some.count / some.group.size(), flat.numel()
    owed = reduction.sent.left.view(-1)[:size]
    _lay_by(owed, reduction.summed.left[0], place=some.whole)
    reduction.summed.left.zero_()
    if some.count == 1:
        flat.add_(owed, alpha=share)
        owed.zero_()
        return flat
    place = Rounding(size, parts=some.count, dtype=flat.dtype, device=flat.device, wire=wire)
    place.left.view(-1)[:size].add_(owed, alpha=share)
    packed = place.pack(flat)
    torch.mul(place.left.view(-1)[:size], 1.0 / share, out=owed)
    came = some.traded(packed)
    sums = Rounding(place.left.shape[1], parts=1, dtype=flat.dtype, device=flat.device, wire=wire)
    made = sums.pack(place.total(came, flat.dtype))
    _lay_by(owed, sums.left[0].div_(share), place=some.place)
    return sums.unpack(some.gathered(made[0]), flat.dtype).view(-1)[:size].div_(some.count)


def _lay_by(owed: Tensor, left: Tensor, *, place: int) -> None:
    """`left` of the part at `place` is added to what is owed of it; parts are filled up behind the last one."""
    part = owed[place * left.numel() : (place + 1) * left.numel()]
    part.add_(left[: part.numel()])
