"""At how many places, ranks or nodes, a token meets the experts that it chose."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost.work import FloatArray


class Routed(NamedTuple):
    """Every token chooses `copies` experts, in `chosen_groups` of `groups` groups of them."""

    copies: float
    groups: float
    chosen_groups: float


def met(places: FloatArray, routed: Routed) -> FloatArray:
    """Places that hold an expert of a token, for each expert that it chose, all chosen evenly.

    Of n places that k experts are drawn from evenly, n (1 - (1 - 1/n)^k) hold one of them; those n are the places of
    the groups that it may choose in, where experts are in groups (2412.19437).
    """
    spread = _drawn(places, routed.chosen_groups)
    among = np.where(places < routed.groups, spread, places * routed.chosen_groups / routed.groups)
    return _drawn(np.maximum(among, 1.0), routed.copies) / routed.copies


def _drawn(places: FloatArray, times: float) -> FloatArray:
    """How many of `places` are met in so many draws of one of them."""
    return np.asarray(places * (1.0 - (1.0 - 1.0 / places) ** times), dtype=np.float64)
