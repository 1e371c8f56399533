"""Choices of experts that a rank sends and receives where they are as even as whole tokens can be."""

from __future__ import annotations

import numpy as np

from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import Mixture


def sent_choices(part: Mixture, sizes: Sizes) -> FloatArray:
    """Of a microbatch's tokens on one rank of the grid, whole numbers of every slice, shape (combinations,)."""
    return np.asarray((sizes.slices + sizes.zeros) * _of_a_slice(part, sizes))


def received_choices(part: Mixture, sizes: Sizes) -> FloatArray:
    """By the fullest rank of experts, where each of them sends as many to every expert: what is left over is of the
    first ones. Without a grid they stay where they are."""
    grid = np.asarray(sizes.expert + sizes.zeros) > 0.0
    holders, slices = np.where(grid, sizes.expert, 1.0), np.where(grid, sizes.expert_tensor, 1.0)
    here, once = part.experts / holders, _of_a_slice(part, sizes)
    each = np.floor(once / part.experts)
    fullest = holders * (here * each + np.minimum(once - part.experts * each, here))
    return np.where(grid, slices * (sizes.slices + sizes.zeros) * fullest, sent_choices(part, sizes))


def _of_a_slice(part: Mixture, sizes: Sizes) -> FloatArray:
    grid = np.asarray(sizes.expert + sizes.zeros) > 0.0
    chosen = sizes.tokens / np.where(grid, sizes.tensor, 1.0) * part.top_k
    return np.asarray(np.ceil(chosen / (sizes.slices + sizes.zeros) * part.routing.kept_share))
