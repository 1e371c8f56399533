"""What backward keeps of a layer under a policy that chooses operators, and not parts, to run again."""

from __future__ import annotations

import numpy as np

from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import Attention, Block, FeedForward, Layer


def operator_outputs(block: Block, sizes: Sizes) -> FloatArray | None:
    """Bytes that a policy by operators keeps of a layer: its input, what attention and every second product give.

    torchtitan's selective recompute (activation_checkpoint, `selective_ac_option = "op"`): products are counted from
    the layer's first, and odd ones keep what they give. None where the layer is not attention and a feed-forward.
    """
    attends = isinstance(block, Layer) and isinstance(block.mixer, Attention)
    if not (attends and isinstance(block, Layer) and isinstance(block.transform, FeedForward)):
        return None
    mixer, part = block.mixer, block.transform
    assert isinstance(mixer, Attention)
    m, t = sizes.tokens, sizes.tensor
    width, hidden = mixer.width / sizes.split, part.hidden / t
    query, key = mixer.heads * mixer.head_dim / t, np.maximum(mixer.kv_heads / t, 1.0) * mixer.head_dim
    given = [query, key, *([] if mixer.shared_key_value else [key]), width]
    given += [hidden, *([hidden] if part.gated else []), width]
    kept = width + query + sum(given[::2], sizes.zeros)
    return sizes.itemsize * m * kept + sizes.wide * m * mixer.heads / t
