"""A feed-forward that is told in part: the model that is predicted and the count of its FLOPs read the same one."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.replay.express import express
from meshwright.spec.blocks import FeedForward
from tests.replay.test_unsaid import MIXTRAL
from tests.replay.test_unsaid import row as mixture_row
from tests.replay.test_validate import ROW, row

RATE = {"iter_s": "", "tflops_gpu": "100", "flop_conv": "3x fwd, full attention"}


@pytest.mark.parametrize("arch", ["gpt", "decoder", "bert"])
def test_a_blank_width_is_four_times_the_models(arch: str) -> None:
    blank, said = row(**RATE, arch=arch, ffn=""), row(**RATE, arch=arch, ffn="8192")
    assert blank.seconds == said.seconds
    assert blank.seconds is not None
    found = express(blank)
    part = found.design.model.layers[0].transform
    assert isinstance(part, FeedForward)
    assert part.hidden == 8192
    assert "a feed-forward of four times the width" in found.assumed


def test_a_blank_width_of_a_gated_one_is_eight_thirds() -> None:
    """5,461.3 in whole multiples of 256."""
    assert row(**RATE, arch="llama", ffn="").seconds == row(**RATE, arch="llama", ffn="5632").seconds


@pytest.mark.parametrize(
    ("arch", "gated"), [("gpt", "no"), ("bert", "no"), ("", "no"), ("llama", "yes"), ("qwen", "yes")]
)
def test_a_blank_gate_is_that_of_the_kind_of_model(arch: str, gated: str) -> None:
    blank, said = (row(**RATE, arch=arch, ffn="8192", gated=text) for text in ("", gated))
    assert blank.seconds == said.seconds
    parts = [express(one).design.model.layers[0].transform for one in (blank, said)]
    assert parts[0] == parts[1]


def test_experts_of_no_printed_width_are_as_wide_as_a_feed_forward() -> None:
    said = mixture_row(mfu_pct="49.3")
    told = mixture_row(mfu_pct="49.3", expert_ffn="", ffn=MIXTRAL["expert_ffn"])
    assert told.seconds == said.seconds


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"flop_conv": "6ND"}, "no flop_conv that is known"),
        ({"vocab": ""}, "no vocab"),
        ({"heads": "", "vocab": ""}, "no heads, vocab"),
    ],
)
def test_what_keeps_a_rate_from_being_a_time_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cells: dict[str, str], why: str
) -> None:
    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as opened:
        table = csv.DictWriter(opened, [*ROW, "tflops_gpu", "flop_conv"])
        table.writeheader()
        table.writerow({**ROW, **RATE, **cells})
    assert main(["validate", str(file)]) == 0
    assert f"(1 with FLOP/s and {why})" in " ".join(capsys.readouterr().out.split())
