"""What a source keeps to itself, and FLOP/s in place of seconds."""

from __future__ import annotations

import pytest

from meshwright.replay.express import express
from meshwright.replay.runs import Run
from meshwright.spec.plan import ScheduleKind

MIXTRAL = {
    "id": "mixtral",
    "source_id": "S",
    "arch": "moe",
    "layers": "56",
    "hidden": "6144",
    "heads": "48",
    "kv_heads": "8",
    "head_dim": "128",
    "gated": "yes",
    "vocab": "32000",
    "seq": "4096",
    "n_experts": "8",
    "topk": "2",
    "expert_ffn": "16384",
    "gpu": "H100-80GB-SXM",
    "n_gpus": "128",
    "gpus_per_node": "8",
    "peak_tflops": "989.5",
    "framework": "Megatron-Core",
    "tp": "2",
    "pp": "8",
    "dp": "8",
    "ep": "8",
    "etp": "1",
    "zero": "1",
    "gbs": "256",
    "precision": "bf16",
    "status": "ok",
    "flop_conv": "Megatron MFU vs 989.5 (3x fwd, full attention reproduces it)",
}


def row(**changes: str) -> Run:
    return Run(line=2, columns={**MIXTRAL, **changes})


def test_seconds_of_a_share_are_those_of_the_rate_that_is_printed_beside_it():
    """2504.14960 prints 487.7 TFLOP/s as 49.3 % of 989.5."""
    share, rate = row(mfu_pct="49.3").seconds, row(tflops_gpu="487.7").seconds
    assert share == pytest.approx(rate, rel=2e-3)


def test_three_times_forward_with_attention_to_all():
    """2 x 64.9 GFLOP a token and layer of its own parameters, twice 4 s h of attention: counted by hand."""
    layer = 2 * (2 * 6144 * 6144 + 2 * 6144 * 1024 + 2 * 3 * 6144 * 16384 + 6144 * 8) + 4 * 4096 * 6144
    flops = 3 * 256 * 4096 * (56 * layer + 2 * 6144 * 32000)
    assert row(tflops_gpu="400").seconds == pytest.approx(flops / (400e12 * 128))


@pytest.mark.parametrize(
    "changes",
    [{"flop_conv": "of some kind"}, {"heads": ""}, {"mfu_pct": "", "tflops_gpu": ""}, {"peak_tflops": ""}],
)
def test_a_rate_without_its_count_is_no_time(changes):
    assert row(**{"mfu_pct": "49.3", **changes}).seconds is None


def test_stages_on_a_rank_that_are_kept_secret_are_tried():
    said = "token-drop capacity factor 1; vpp and mbs not printed"
    found = express(row(extra=said)).others
    chunks = {(one.plan.schedule.kind, one.plan.schedule.chunks) for one in found}
    assert (ScheduleKind.INTERLEAVED, 7) in chunks
    assert (ScheduleKind.ONE_F_ONE_B, 1) in chunks
    for one in found:
        assert one.plan.batch == 256
        assert [stage.start for stage in one.plan.stages] == [0, *(stage.stop for stage in one.plan.stages[:-1])]
        assert one.plan.stages[-1].stop == 58


def test_only_where_the_table_says_so():
    assert {one.plan.schedule.chunks for one in express(row()).others} == {1}
    assert not express(row(mbs="1", extra="dispatcher=deepep")).others
    assert not express(row(mbs="1", pp="1", dp="64", extra="vpp not printed")).others
