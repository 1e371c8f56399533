"""How libraries move the bytes of a collective: what a step and a byte cost by algorithm and protocol.

Figures are those by which NCCL itself chooses (NVIDIA/nccl, src/graph/tuning.cc, 2.24: baseLat, hwLat and the shares
of bandwidth that protocols leave; LL's quarter is that of 2.8, which later versions bound by the processor instead);
RCCL keeps the same table. A link's own latency stands for a step of a ring in the plain protocol, and the table says
how the others compare with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind

_NEAR, _FAR = 3.4, 14.0  # microseconds of a step of a plain ring over NVLink and over the network


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocols:
    """Protocols of one algorithm, columns of shape (protocols, 1).

    `start` seconds a call; a step takes `near` of the latency of a link in the node and `far` of one beyond it.
    `share` of the bandwidth is left: a flag beside every 4 bytes (LL) or every 120 (LL128) replaces waiting.
    """

    names: tuple[str, ...]
    start: FloatArray
    near: FloatArray
    far: FloatArray
    share: FloatArray

    def only(self, index: int) -> Protocols:
        row = slice(index, index + 1 or None)
        columns = (self.start[row], self.near[row], self.far[row], self.share[row])
        return Protocols(names=self.names[row], start=columns[0], near=columns[1], far=columns[2], share=columns[3])


def _table(rows: Mapping[str, tuple[float, float, float, float]]) -> Protocols:
    """Rows of start, near, far (microseconds) and share, as NCCL's table has them."""
    start, near, far, share = np.asarray(list(rows.values())).T[..., None]
    return Protocols(names=tuple(rows), start=start * 1e-6, near=near / _NEAR, far=far / _FAR, share=share)


SUMS_LATENCY = 25e-6  # seconds of an all-reduce that the switch adds (NVLS over NVLink in the same table)

_RINGS = _table(
    {
        "ring/simple": (8.4, 3.4, 14.0, 1.0),
        "ring/ll128": (14.0, 1.9, 4.0, 0.92),
        "ring/ll": (6.6, 0.6, 2.7, 0.25),
    }
)
_TREES = _table(
    {
        "tree/simple": (0.0, 4.0, 14.0, 0.92),
        "tree/ll128": (14.0, 1.25, 8.5, 0.92 * 0.92),
        "tree/ll": (6.8, 0.6, 5.0, 0.92 / 3.8),
    }
)
_RING = _table({"ring": (0.0, _NEAR, _FAR, 1.0)})
_TREE = _table({"tree": (0.0, _NEAR, _FAR, 0.5)})


def ring_protocols(kind: DeviceKind) -> Protocols:
    return _RINGS if kind in (DeviceKind.CUDA, DeviceKind.ROCM) else _RING


def tree_protocols(kind: DeviceKind) -> Protocols:
    """Double binary trees where the library has them; elsewhere one tree, whose ranks send every byte twice."""
    return _TREES if kind in (DeviceKind.CUDA, DeviceKind.ROCM) else _TREE
