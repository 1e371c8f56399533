"""Low rank training: dense until ranks have settled, then thin factors of matrices where that makes steps faster.

Pufferfish (2103.03936) and Cuttlefish (2305.02538). What it takes is priced in `cost.low_rank`; deciding (`policy`)
needs no torch either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec.plan import Design
    from meshwright.train.technique import Technique


def build(design: Design) -> Technique:
    """The technique as `design.job.low_rank` says."""
    from meshwright.techniques.low_rank.runtime import LowRankTraining

    return LowRankTraining(design)
