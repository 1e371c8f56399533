"""What the loss of nn copies of the logits, which it reads in chunks."""

from __future__ import annotations

import numpy as np

from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind

# The loss of nn reads logits in chunks of so many elements (nn/loss.py).
_CHUNK_ELEMENTS = {DeviceKind.CPU: 2.0**20}
_ACCELERATOR_CHUNK_ELEMENTS = 2.0**26


def chunks_bytes(elements: FloatArray, compute: FloatArray, *, kind: DeviceKind) -> tuple[FloatArray, FloatArray]:
    """Copies of chunks in the loss's forward and in its backward: in fp32 where logits are not, shifted in forward, and
    of the first one until those of the second replace it, which may be the rest."""
    size = _CHUNK_ELEMENTS.get(kind, _ACCELERATOR_CHUNK_ELEMENTS)
    wide, narrow = np.maximum(compute, 4.0), 1.0 * (compute < 4.0)
    first, second = np.minimum(elements, size) * wide, np.clip(elements - size, 0.0, size) * wide
    forward = np.maximum(first * (1.0 + narrow), np.where(second > 0.0, first + second * (1.0 + narrow), 0.0))
    return forward, (first + second) * narrow
