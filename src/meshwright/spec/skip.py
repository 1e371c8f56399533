"""SkipPipe (2502.19913): what a job allows of microbatches that leave out stages of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MOST_SKIPPED = 1.0 / 3.0  # of the layers, up to which the paper shows models that converge
ROUNDED = 1e-3  # by which a share that is written with three digits may be too small


class Swap(StrEnum):
    """Which stages a microbatch may pass in another order: none, or two that are neighbours."""

    NONE = "none"
    NEIGHBOURS = "neighbours"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipSpec:
    """`share` is how much of the layers a microbatch may leave out, on the mean of a step's microbatches; 0: nothing.

    The first and the last stage are never left out, and the others equally often. What is trained so is another model
    than one whose tokens pass every layer, and its quality has to be measured.
    """

    share: float = 0.0
    swap: Swap = Swap.NONE
