"""What the loss of nn copies of the logits, which it reads in chunks."""

from __future__ import annotations

import numpy as np

from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind

# The loss of nn reads logits in chunks of so many elements (nn/loss.py).
_CHUNK_ELEMENTS = {DeviceKind.CPU: 2.0**20}
_ACCELERATOR_CHUNK_ELEMENTS = 2.0**26


def chunks_bytes(elements: FloatArray, compute: FloatArray, *, kind: DeviceKind) -> tuple[FloatArray, FloatArray]:
    """The copy of a chunk in the loss's forward and in its backward, which has one in fp32 where logits are not."""
    size = _CHUNK_ELEMENTS.get(kind, _ACCELERATOR_CHUNK_ELEMENTS)
    chunk = np.minimum(elements, size) * np.maximum(compute, 4.0)
    return chunk, chunk * (compute < 4.0)
