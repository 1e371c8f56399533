"""Blocks over stages: the partition whose slowest stage is fastest, embedding and head counted as real work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
SLACK = 1.0 + 1e-12


class Balancer:
    """Exact contiguous partitions of one model's blocks by dynamic programming over (stages, blocks).

    Equal stages share one table for every number of stages, O(stages * blocks^2) in all; stages of unequal speed
    get a table of their own.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        prefix = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
        spans = prefix[None, :] - prefix[:, None]
        self.blocks = len(seconds)
        self.spans: Floats = np.where(np.tri(self.blocks + 1, dtype=np.bool_), np.inf, spans)
        self.equal: list[Floats] = []

    def bounds(self, stages: int, *, speeds: Sequence[float] | None = None) -> tuple[int, ...]:
        """Boundaries 0 = b[0] < b[1] < ... < b[stages] = blocks: stage s holds blocks [b[s], b[s + 1]).

        The largest stage time, a stage's summed seconds over `speeds[s]` (1 where not given), is the least that any
        contiguous partition into non-empty stages reaches. Among those, late stages are as full as they go: early
        stages hold more microbatches in flight, so the room they are left with is worth most there. Raises
        ValueError when the blocks are fewer than the stages.
        """
        if not 1 <= stages <= self.blocks:
            raise ValueError(f"{self.blocks} blocks do not fill {stages} stages")
        if speeds is None or len(set(speeds)) == 1:
            rates: Sequence[float] = (1.0,) * stages
            self._extend(self.equal, rates)
            best = self.equal
        else:
            rates, best = speeds, []
            self._extend(best, rates)
        limit = float(best[stages - 1][self.blocks]) * SLACK
        stop, bounds = self.blocks, [self.blocks]
        for stage in range(stages - 1, 0, -1):
            reached = np.maximum(best[stage - 1], self.spans[:, stop] / rates[stage])
            stop = int(np.argmax(reached <= limit))
            bounds.append(stop)
        return (0, *reversed(bounds))

    def _extend(self, best: list[Floats], rates: Sequence[float]) -> None:
        """best[s][j]: the least bottleneck of blocks [0, j) over stages 0 .. s, for every stage of `rates`."""
        if not best:
            best.append(self.spans[0] / rates[0])
        for stage in range(len(best), len(rates)):
            best.append(np.maximum(best[-1][:, None], self.spans / rates[stage]).min(axis=0))
