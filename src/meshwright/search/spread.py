"""How fast the ranks of a pipeline are together on unlike machines, however its blocks are divided among them."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt

from meshwright.search.space import Space
from meshwright.spec.cluster import ClusterSpec

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class Spread:
    """The node groups under every pipeline rank of the frames of `space`: a rank is as fast as the slowest of them."""

    def __init__(self, space: Space, *, cluster: ClusterSpec) -> None:
        frames = space.frames
        world = frames["tensor"] * frames["context"] * frames["pipeline"] * frames["data"]
        ends = list(accumulate(group.num_devices for group in cluster.groups))
        self._ends = np.array(ends, dtype=np.int64)
        self._starts = np.array([0, *ends[:-1]], dtype=np.int64)
        pairs, of = np.unique(np.stack([frames["pipeline"], world]), axis=1, return_inverse=True)
        self._of: Ids = of.reshape(-1)
        each = [self._under(int(ranks), int(used)) for ranks, used in pairs.T]
        none = np.zeros((0, len(ends)), dtype=np.bool_)
        self._kinds, which = np.unique(np.concatenate([none, *each]), axis=0, return_inverse=True)
        self._ranks = np.zeros((len(each), len(self._kinds)))
        places = np.repeat(np.arange(len(each)), np.array([len(rows) for rows in each], dtype=np.int64))
        np.add.at(self._ranks, (places, which.reshape(-1)), 1.0)

    def _under(self, pipeline: int, world: int) -> npt.NDArray[np.bool_]:
        """The groups under every rank of a pipeline on the first `world` devices, shape (ranks, groups)."""
        low = np.arange(pipeline)[:, None] * (world // pipeline)
        return np.asarray((self._starts < low + world // pipeline) & (self._ends > low), dtype=np.bool_)

    def together(self, seconds: Floats, frames: Ids) -> Floats:
        """Seconds in which the ranks of each of `frames` do what takes one rank `seconds` (frames, groups) on machines
        of each group, divided so that all end at once: no division ends sooner. Shape (frames,)."""
        if not len(frames):
            return np.zeros(0)
        slowest = np.stack([seconds[:, kind].max(axis=1) for kind in self._kinds], axis=1)
        ranks = self._ranks[self._of[frames]]
        return np.asarray(1.0 / np.maximum((ranks / np.maximum(slowest, 1e-300)).sum(axis=1), 1e-300))
