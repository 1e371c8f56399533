"""Spans as a trace that Perfetto and chrome://tracing open: the prediction and the run as two processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from meshwright.report.run_files import RunFiles, predicted_spans, read_run, write_file
from meshwright.spec.span import Span

PREDICTED, MEASURED = 1, 2


def write_trace(run: Path | str, out: Path | str) -> Path:
    """Writes the trace of a run directory or plan file to `out` and returns its path."""
    files = read_run(run)
    text = json.dumps(trace(files), separators=(",", ":"))
    return write_file(out, text, fix="--no-trace leaves it out")


def trace(files: RunFiles, *, predicted: Sequence[Span] | None = None) -> dict[str, Any]:
    """The trace document (Trace Event Format). Times are microseconds; each process begins at 0.

    `predicted` is the timeline of one step; None computes it from the design.
    """
    ours = predicted_spans(files) if predicted is None else predicted
    events = [*_process(PREDICTED, "predicted: one step", "pipeline rank", ours)]
    if files.spans:
        events += _process(MEASURED, "measured: sampled steps", "worker", files.spans)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run": files.name, "plan": files.design.plan.describe()},
    }


def _process(process: int, name: str, row: str, spans: Sequence[Span]) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for rank in sorted({span.rank for span in spans}):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"{row} {rank}"}}
    origin = min((span.start for span in spans), default=0.0)
    for span in spans:
        numbers = {"stage": span.stage, "microbatch": span.microbatch, "step": span.step}
        label = f"{span.name} {span.microbatch}" if span.microbatch >= 0 else span.name
        yield {
            "ph": "X",
            "name": label,
            "cat": span.name,
            "pid": process,
            "tid": span.rank,
            "ts": round((span.start - origin) * 1e6, 3),
            "dur": round(span.seconds * 1e6, 3),
            "args": {key: value for key, value in numbers.items() if value >= 0},
        }
