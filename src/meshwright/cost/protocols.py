"""How libraries move the bytes of a collective: what a step and a byte cost by algorithm and protocol.

Figures are those by which NCCL itself chooses (NVIDIA/nccl, src/graph/tuning.cc, 2.24: baseLat, hwLat and the shares
of bandwidth that protocols leave; LL's quarter is that of 2.8, which later versions bound by the processor instead);
RCCL keeps the same table. A link's own latency stands for a step of a ring in the plain protocol, and the table says
how the others compare with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.cluster import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """`start` seconds a call; a step takes `near` of the latency of a link in the node and `far` of one beyond it.

    `share` of the bandwidth is left: a flag beside every 4 bytes (LL) or every 120 (LL128) replaces waiting.
    """

    name: str
    start: float
    near: float
    far: float
    share: float


_NEAR, _FAR = 3.4, 14.0  # microseconds of a step of a plain ring over NVLink and over the network

RINGS = (
    Protocol(name="ring/simple", start=8.4e-6, near=1.0, far=1.0, share=1.0),
    Protocol(name="ring/ll128", start=14.0e-6, near=1.9 / _NEAR, far=4.0 / _FAR, share=0.92),
    Protocol(name="ring/ll", start=6.6e-6, near=0.6 / _NEAR, far=2.7 / _FAR, share=0.25),
)
TREES = (
    Protocol(name="tree/simple", start=0.0, near=4.0 / _NEAR, far=14.0 / _FAR, share=0.92),
    Protocol(name="tree/ll128", start=14.0e-6, near=1.25 / _NEAR, far=8.5 / _FAR, share=0.92 * 0.92),
    Protocol(name="tree/ll", start=6.8e-6, near=0.6 / _NEAR, far=5.0 / _FAR, share=0.92 / 3.8),
)
SUMS_LATENCY = 25e-6  # seconds of an all-reduce that the switch adds (NVLS over NVLink in the same table)
PLAIN = (Protocol(name="ring", start=0.0, near=1.0, far=1.0, share=1.0),)
PLAIN_TREES = (Protocol(name="tree", start=0.0, near=1.0, far=1.0, share=0.5),)


def ring_protocols(kind: DeviceKind) -> tuple[Protocol, ...]:
    return RINGS if kind in (DeviceKind.CUDA, DeviceKind.ROCM) else PLAIN


def tree_protocols(kind: DeviceKind) -> tuple[Protocol, ...]:
    """Double binary trees where the library has them; elsewhere one tree, whose ranks send every byte twice."""
    return TREES if kind in (DeviceKind.CUDA, DeviceKind.ROCM) else PLAIN_TREES
