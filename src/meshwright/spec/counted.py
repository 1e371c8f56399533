"""Predicted against counted: every figure that both have, with what differs."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.report import Gap, Line, Report, StageMemory


def count_gaps(predicted: Report, counted: Report) -> tuple[Gap, ...]:
    """The gap of every figure: FLOPs and bytes of each line under `step`, bytes of each part of memory and of the
    peak of each pipeline rank. `measured` of a Gap is what was counted; the unit is FLOP or B."""
    return tuple(gap for gap in (*_lines(predicted, counted), *_memory(predicted, counted)))


def _lines(predicted: Report, counted: Report) -> Iterator[Gap]:
    names = dict.fromkeys(line.name for report in (predicted, counted) for line in report.step.lines)
    for name in names:
        ours, theirs = (report.step.find(name) or Line(name=name) for report in (predicted, counted))
        if ours.flops or theirs.flops:
            yield Gap(name=name, predicted=ours.flops, measured=theirs.flops, unit="FLOP")
        if ours.bytes or theirs.bytes:
            yield Gap(name=name, predicted=ours.bytes, measured=theirs.bytes, unit="B")


def _memory(predicted: Report, counted: Report) -> Iterator[Gap]:
    told = {stage.rank: stage for stage in predicted.memory}
    for stage in counted.memory:
        ours = told.get(stage.rank, StageMemory(rank=stage.rank, parts={}, capacity=stage.capacity))
        for part in dict.fromkeys((*ours.parts, *stage.parts)):
            yield Gap(
                name=f"rank {stage.rank} {part}",
                predicted=ours.parts.get(part, 0.0),
                measured=stage.parts.get(part, 0.0),
                unit="B",
            )
        if ours.host or stage.host:
            yield Gap(name=f"rank {stage.rank} on the host", predicted=ours.host, measured=stage.host, unit="B")
        yield Gap(name=f"rank {stage.rank} peak", predicted=ours.total, measured=stage.total, unit="B")
