"""A defect that a rank is given for one call, to see it found."""

from __future__ import annotations

from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from meshwright.parallel import collectives
from meshwright.spec.plan import Design
from tests.parallel import parity_cases
from tests.parallel.parity_cases import Documents, Masks, RankOutcome


def wrongly_scaled(design: Design, packed: Documents, masks: Masks = Masks.NONE, steps: int = 1) -> RankOutcome:
    """As `parity_cases.one_rank`, where sums that sequence parallel ranks share out are a part in a thousand too
    large."""
    right = collectives.scatter_sequence

    def wrong(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return right(x, group) * 1.001

    with patch.object(collectives, "scatter_sequence", wrong):
        return parity_cases.one_rank(design, packed, masks, steps)
