"""Parts of a block as the last slice but one of a microbatch has them, which goes back when memory is highest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.kept_keys import all_joined
from meshwright.cost.kept_part import Kept
from meshwright.cost.work import FloatArray, Sizes


def going_back(parts: tuple[Kept, ...], sizes: Sizes) -> tuple[Kept, ...]:
    """`parts`, of which a slice has its share, where microbatches come in slices.

    It has put all keys but one run together; what it runs again leaves its own keys to none. Of two slices it is the
    first, which has its own alone.
    """
    slices = np.asarray(sizes.slices + sizes.zeros)
    return tuple(_going_back(part, slices) for part in parts) if (slices > 1.0).any() else parts


def _going_back(part: Kept, slices: FloatArray) -> Kept:
    before = np.maximum(slices - 1.0, 1.0)
    several = slices > 2.0
    runs = np.where(several, before * slices / np.maximum(all_joined(slices), 1.0), 0.0)
    grown = part.joined * runs + np.where(several, 0.0, part.first * slices)
    more, own = np.where(slices > 1.0, grown - part.joined - part.first, 0.0), part.handed / before
    return replace(
        part,
        saved=part.saved + more + np.where(several, -part.handed, own),
        core=part.core + more + own,
    )
