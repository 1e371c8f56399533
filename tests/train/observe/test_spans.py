"""Spans of sampled steps on disk."""

from __future__ import annotations

import json
import time
from pathlib import Path

from meshwright.spec.codec import decode
from meshwright.spec.span import Span
from meshwright.train.observe.spans import SpanFile, sampled


def test_three_early_steps_then_one_in_fifty() -> None:
    assert [step for step in range(1, 160) if sampled(step)] == [5, 6, 7, 50, 100, 150]


def test_only_sampled_steps_are_kept_with_their_step_and_rank(tmp_path: Path) -> None:
    recorder = SpanFile(tmp_path, rank=2)
    for step in range(101, 110):
        recorder.begin(step)
        recorder.record("forward", time.perf_counter(), 0.25, stage=1, microbatch=3)
        recorder.end()
    path = tmp_path / "spans" / "rank-00002.jsonl"
    spans = [decode(Span, json.loads(line)) for line in path.read_text().splitlines()]
    assert [span.step for span in spans] == [105, 106, 107]
    assert {(span.rank, span.stage, span.microbatch, span.name) for span in spans} == {(2, 1, 3, "forward")}
    assert all(abs(span.start - time.time()) < 60.0 for span in spans)


def test_nothing_is_kept_outside_a_step(tmp_path: Path) -> None:
    recorder = SpanFile(tmp_path, rank=0)
    recorder.record("forward", 0.0, 1.0)
    assert recorder.end() == ()
