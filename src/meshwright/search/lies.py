"""Which kinds of devices the pipeline ranks of a plan lie on, by the devices that it uses: stages are balanced for
those."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from meshwright.spec.cluster import ClusterSpec

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lies:
    """Frames of one pipeline and one of the numbers `of`, shape (frames,), have ranks on the same kinds of devices.

    `devices[pipeline, number]` is how many devices one of these frames uses.
    """

    of: Ids
    devices: Mapping[tuple[int, int], int]


def lies(cluster: ClusterSpec, *, pipeline: Ids, world: Ids) -> Lies:
    """How frames of so many pipeline ranks on the first `world` devices of the cluster lie, pipelines outermost.

    0 are those whose ranks all lie on the same kinds.
    """
    numbers: dict[int, dict[tuple[frozenset[int], ...], int]] = defaultdict(dict)
    devices: dict[tuple[int, int], int] = {}
    pairs, inverse = np.unique(np.stack([pipeline, world]), axis=1, return_inverse=True)
    found = []
    for ranks, used in pairs.T.tolist():
        kinds = _kinds(cluster, pipeline=ranks, world=used)
        known = numbers[ranks]
        number = known.setdefault(kinds, len(known) + 1) if len(set(kinds)) > 1 else 0
        devices.setdefault((ranks, number), used)
        found.append(number)
    return Lies(of=np.array(found, dtype=np.int64)[inverse.reshape(-1)], devices=devices)


def _kinds(cluster: ClusterSpec, *, pipeline: int, world: int) -> tuple[frozenset[int], ...]:
    """The kinds of devices that every pipeline rank lies on; of none where all are alike."""
    known = [group.device for group in cluster.groups]
    kinds = [known.index(device) for device in known]
    if len(set(kinds)) == 1:
        return ()
    each, ends = world // pipeline, tuple(accumulate(group.num_devices for group in cluster.groups))
    starts = (0, *ends[:-1])
    return tuple(
        frozenset(
            kind
            for kind, start, end in zip(kinds, starts, ends, strict=True)
            if start < (rank + 1) * each and end > rank * each
        )
        for rank in range(pipeline)
    )
