"""Holdings of what is not told yet are refused in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.holdings import holdings
from meshwright.spec.errors import ConfigError
from meshwright.spec.optimizer import Master, Moments, OptimizerSpec
from meshwright.spec.plan import Design, TensorGrid
from tests.support import models
from tests.support.designs import Layout, design


def kept(**fields: object) -> Design:
    entry = design(models.model(), Layout())
    return replace(entry, job=replace(entry.job, optimizer=OptimizerSpec(**fields)))


UNTOLD = {
    "tensors on a square": design(models.model(), Layout(tensor=4, tensor_grid=TensorGrid.SQUARE)),
    "kept as bf16_stochastic": kept(master=Master.BF16_STOCHASTIC),
    "moments kept as fp8": kept(state=Moments.FP8),
}


@pytest.mark.parametrize("words", UNTOLD)
def test_what_is_not_told_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        holdings(UNTOLD[words])
    assert holdings(kept())
