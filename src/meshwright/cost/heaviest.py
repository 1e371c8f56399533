"""What the uneven work of context ranks costs: the rank with most scores decides, for the others wait for it."""

from __future__ import annotations

from functools import cache

import numpy as np

from meshwright.cost.table import TOKEN_LAYOUTS
from meshwright.cost.token_layouts import layout_imbalance
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.exchange import TokenLayout
from meshwright.spec.model import LatentAttention, Mixer, Recurrence, prefix_tokens

_share = cache(layout_imbalance)
_USUAL = TOKEN_LAYOUTS.index(TokenLayout.ZIGZAG)


def heaviest_rank(mixer: Mixer, sizes: Sizes) -> FloatArray | float:
    """The scores of the context rank that has most of them over the mean, by combination.

    Ranks that trade tokens for heads do the work of all their tokens. Documents are not known before they are read:
    each sequence counts as one, and of a prefix mask as many of its first tokens as the model says are the prompt.
    """
    context = np.asarray(sizes.context)
    if not (context > 1.0).any() or isinstance(mixer, Recurrence) or not getattr(mixer, "causal", True):
        return 1.0
    sparse = mixer.indexer if isinstance(mixer, LatentAttention) else None
    window = sparse.top_k if sparse else mixer.window
    layouts = np.asarray(_USUAL if sizes.token_layout is None else sizes.token_layout)
    rows = (row.ravel().tolist() for row in np.broadcast_arrays(layouts, context, sizes.inner, sizes.slices))
    found = [
        _share(
            TOKEN_LAYOUTS[layout],
            length=int(sizes.sequence),
            ranks=int(ranks),
            traders=int(traders),
            window=window,
            chunk=getattr(mixer, "chunk", None),
            prefix=prefix_tokens(int(sizes.sequence), mixer.prefix),
            slices=int(slices),
        )
        if ranks > 1.0 and sizes.sequence % (2.0 * ranks * slices) == 0.0
        else 1.0
        for layout, ranks, traders, slices in zip(*rows, strict=True)
    ]
    return np.array(found)
