"""Ledger: what a run has read of its data, so that anyone can check that each sequence was read exactly once."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.data.fingerprint import BITS
from meshwright.parallel.outer import Learners, OuterSync
from meshwright.spec.errors import ConfigError, Problem, WorkerFailed
from meshwright.spec.plan import AxisName

_READ_ALIKE = (AxisName.PIPELINE, AxisName.CONTEXT, AxisName.TENSOR)


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What the steps that made the present parameters have read, from sequence `since` on.

    `read` is the sum of the fingerprints of what all data ranks read and `dropped` counts sequences of which a learner
    undid its step, both as they were when the run was last saved; `skipped` are stretches [start, stop) that no step
    read, in order. What this rank has read since then is its own until it is `gathered`.
    """

    since: int = 0
    read: int = 0
    dropped: int = 0
    skipped: list[tuple[int, int]] = field(default_factory=list)
    own_read: int = 0
    own_dropped: int = 0

    def note(self, fingerprint: int, *, dropped: int = 0) -> None:
        """A step has read sequences of this sum, of which so many were dropped."""
        self.own_read = (self.own_read + fingerprint) % 2**BITS
        self.own_dropped += dropped

    def skip(self, start: int, stop: int) -> None:
        """No step reads [start, stop)."""
        if self.skipped and self.skipped[-1][1] == start:
            start = self.skipped.pop()[0]
        if start < stop:
            self.skipped.append((start, stop))

    def gather(self, learners: Learners, outer: OuterSync | None, *, device: torch.device) -> None:
        """What every rank has read since this was called last is in `read`, once for all that read the same.

        Collective. Raises WorkerFailed where ranks that read the same sequences were given others.
        """
        mesh = learners.mesh
        first = all(mesh.coordinate(axis) == 0 for axis in _READ_ALIKE)
        own = _signed(self.own_read)
        values = torch.tensor([own, own if first else 0, self.own_dropped if first else 0], device=device)
        if mesh.everyone is not None:
            dist.all_reduce(values, group=mesh.everyone)
        unlike = values[0] - values[1] * (mesh.world_size // mesh.data_size) != 0
        values[0] = unlike
        everywhere = values if outer is None else outer.over_learners(values)
        differ, read, dropped = everywhere.tolist()
        if differ:
            raise WorkerFailed(
                Problem(
                    what="ranks of one data rank were given other sequences than each other",
                    where="pipeline, context and tensor ranks, which read the same",
                    why="the tokenised text is not the same on all hosts, or a byte of it changed in memory",
                    fix="delete the cache of tokenised text there; --resume goes on from the last checkpoint",
                )
            )
        self.read = (self.read + read) % 2**BITS
        self.dropped += dropped
        self.own_read = self.own_dropped = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON values of all but what is this rank's own; call `gather` first."""
        return {
            "since": self.since,
            "read": f"{self.read:016x}",
            "dropped": self.dropped,
            "skipped": [list(stretch) for stretch in self.skipped],
        }

    @classmethod
    def of(cls, told: Mapping[str, Any] | None, *, consumed: int) -> Ledger:
        """The one that `to_dict` gave; a new one from sequence `consumed` on where there was none.

        Raises ConfigError where it is none.
        """
        if not told:
            return cls(since=consumed)
        try:
            skipped = [(operator.index(start), operator.index(stop)) for start, stop in told["skipped"]]
            since, dropped = operator.index(told["since"]), operator.index(told["dropped"])
            read = int(told["read"], 16) % 2**BITS
        except (KeyError, TypeError, ValueError) as error:
            problem = Problem(what="what it has read is not told", where="checkpoint state.ledger", why=repr(error))
            raise ConfigError(problem) from None
        edges = [since, *(edge for stretch in skipped for edge in stretch), consumed]
        if sorted(edges) != edges or edges[0] < 0:
            what = f"it skipped stretches that are not in order from {since:,} to {consumed:,}"
            raise ConfigError(Problem(what=what, where="checkpoint state.ledger"))
        return cls(since=since, read=read, dropped=dropped, skipped=skipped)


def _signed(value: int) -> int:
    """As a whole number of 64 bits with a sign, which adds up as one without does."""
    return value - 2**BITS if value >= 2 ** (BITS - 1) else value
