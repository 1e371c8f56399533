"""Rows of long sequences: what is divided over context ranks, and attention that is never written out."""

from __future__ import annotations

import pytest

from meshwright.replay.express import express
from meshwright.spec.plan import Sharding
from tests.replay.test_validate import row

LONG = {"pp": "1", "cp": "16", "dp": "1", "mbs": "1", "gbs": "1", "recompute": "full"}


def test_optimizer_state_is_sharded_over_context_ranks_where_there_is_one_data_rank() -> None:
    for said, sharding in (("3", Sharding.PARAMETERS), ("1", Sharding.OPTIMIZER), ("0", Sharding.NONE)):
        plan = express(row(**LONG, tp="1", zero=said, flash="yes", sp="")).design.plan
        assert plan.first_group.sharding is sharding
        assert (plan.data, plan.context) == (1, 16)
    alone = express(row(**{**LONG, "cp": "1", "n_gpus": "1", "gpus_per_node": "1"}, tp="1", zero="3")).design.plan
    assert alone.first_group.sharding is Sharding.NONE


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"cp": "16", "seq": "131072"}, "whose pieces context ranks put together"),
        ({"cp": "1", "dp": "16", "gbs": "16", "seq": "262144"}, "more than the device has room for"),
        ({"cp": "1", "dp": "16", "gbs": "16", "seq": "2048"}, ""),
    ],
)
def test_attention_that_no_device_could_have_written_out_was_fused(cells: dict[str, str], said: str) -> None:
    for framework in ("Megatron-LM", "Megatron-DeepSpeed"):
        found = express(row(**{**LONG, **cells}, tp="1", zero="1", flash="", framework=framework))
        assert ("flash" in found.design.job.software) == bool(said)
        assert any(said in each for each in found.assumed) == bool(said) or not said
        assert ("attention not fused" in found.assumed) == (not said)
