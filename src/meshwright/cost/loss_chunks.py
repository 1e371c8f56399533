"""The loss in pieces: runs of tokens that head and loss take one by one, and chunks of logits that nn copies."""

from __future__ import annotations

import numpy as np

from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.model import Head

# The loss of nn reads logits in chunks of so many elements (nn/loss.py).
_CHUNK_ELEMENTS = {DeviceKind.CPU: 2.0**20}
_ACCELERATOR_CHUNK_ELEMENTS = 2.0**26


def loss_runs(head: Head, chunks: int, tokens: FloatArray) -> FloatArray:
    """Into how many runs `tokens` of a microbatch are cut where `chunks` tells (as of Software)."""
    if chunks:
        return np.full_like(tokens, float(chunks))
    least = np.ceil(tokens / -(-head.vocab // head.width))
    return np.asarray(np.ceil(tokens / 2.0 ** np.ceil(np.log2(np.maximum(least, 1.0)))), dtype=np.float64)


def chunks_bytes(elements: FloatArray, compute: FloatArray, *, kind: DeviceKind) -> tuple[FloatArray, FloatArray]:
    """The copy of a chunk in the loss's forward and in its backward, which has one in fp32 where logits are not."""
    size = _CHUNK_ELEMENTS.get(kind, _ACCELERATOR_CHUNK_ELEMENTS)
    chunk = np.minimum(elements, size) * np.maximum(compute, 4.0)
    return chunk, chunk * (compute < 4.0)
