"""Spans of sampled steps, one file a rank: what the runtime hands over is kept in memory and written between steps."""

from __future__ import annotations

import json
import time
from pathlib import Path

from meshwright.spec.codec import encode
from meshwright.spec.span import Span

FIRST_SAMPLED = 5
SAMPLED_AT_FIRST = 3
SAMPLE_EVERY = 50


def sampled(step: int) -> bool:
    """Whether step `step` of a process (1 is its first) is kept: three early ones that no instrument slows, then one
    in fifty."""
    return FIRST_SAMPLED <= step < FIRST_SAMPLED + SAMPLED_AT_FIRST or step % SAMPLE_EVERY == 0


class SpanFile:
    """A recorder that appends to `RUN/spans/rank-00000.jsonl`; outside a sampled step it keeps nothing.

    Starts are seconds of the system clock, so that the spans of all ranks share one axis.
    """

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self.path = run_dir / "spans" / f"rank-{rank:05d}.jsonl"
        self._rank, self._step, self._spans = rank, -1, list[Span]()
        self._offset = time.time() - time.perf_counter()
        self._steps_run = 0

    def begin(self, step: int) -> None:
        """Step `step` of the run begins; it is recorded when it is one of those sampled."""
        self._steps_run += 1
        self._step = step if sampled(self._steps_run) else -1

    def record(self, name: str, start: float, seconds: float, *, stage: int = -1, microbatch: int = -1) -> None:
        if self._step < 0:
            return
        self._spans.append(
            Span(
                name=name,
                rank=self._rank,
                start=start + self._offset,
                seconds=seconds,
                stage=stage,
                microbatch=microbatch,
                step=self._step,
            )
        )

    def end(self) -> tuple[Span, ...]:
        """The spans of the step that ends here, now on disk."""
        spans, self._spans, self._step = tuple(self._spans), [], -1
        if spans:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.writelines(json.dumps(encode(span)) + "\n" for span in spans)
        return spans
