"""The measured report sums to the median step, and says what two ranks of a pipeline or of data parallel waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.spec.job import Switch
from meshwright.spec.plan import Axis, AxisName, Plan, Schedule
from meshwright.spec.report import Line, LineName, MemoryPart, Origin, Report, StageMemory
from meshwright.spec.span import Span
from meshwright.train.observe.measured import measured_report
from meshwright.train.observe.memory import AS_WRITTEN_NOTE, of_allocator
from meshwright.train.observe.profile import Profiler, Sampling
from meshwright.train.observe.samples import CollectiveCall, MemoryPeak, RankSample, StepTiming
from tests.support.designs import Layout, design
from tests.support.models import model

PREDICTED = Report(
    plan="p",
    step=Line(name=LineName.STEP, seconds=1.0, lines=(Line(name=LineName.FORWARD, seconds=1.0),)),
    memory=(StageMemory(rank=0, parts={}, capacity=10.0), StageMemory(rank=1, parts={}, capacity=20.0)),
    tokens_per_step=100,
    devices=2,
    model_flops=1e9,
    peak_flops=1e12,
)


def plan(axis: AxisName) -> Plan:
    return Plan(
        model="m",
        cluster="c",
        axes=(Axis(name=axis, size=2),),
        stages=(),
        schedule=Schedule(),
        sequence_length=8,
        microbatch=1,
    )


def span(name: str, start: float, seconds: float, *, step: int, stage: int = 0, microbatch: int = 0) -> Span:
    return Span(name=name, rank=stage, start=start, seconds=seconds, stage=stage, microbatch=microbatch, step=step)


def data_rank(rank: int, *, forward: float) -> RankSample:
    """Steps of 1 s: forward, backward 0.5 with 0.1 of gather and 0.2 of reduction inside, optimizer 0.1, input 0.05."""
    spans, timings = [], []
    for step in range(3):
        start = 10.0 * step
        noise = 0.5 if step == 2 else 0.0
        timings.append(
            StepTiming(step=step, start=start, seconds=1.0 + noise, input_seconds=0.05, optimizer_seconds=0.1 + noise)
        )
        spans += [
            span(LineName.FORWARD, start + 0.1, forward, step=step),
            span(LineName.BACKWARD, start + 0.4, 0.5, step=step),
        ]
    calls = (
        CollectiveCall(
            line=LineName.PARAMETERS, operation="all_gather", ranks=2, bytes=64, start=90.5, held_from=90.5, seconds=0.1
        ),
        CollectiveCall(
            line=LineName.GRADIENTS,
            operation="reduce_scatter",
            ranks=2,
            bytes=128,
            start=90.7,
            held_from=90.7,
            seconds=0.2,
        ),
    )
    return RankSample(
        rank=rank,
        timings=tuple(timings),
        spans=tuple(spans),
        sampled=StepTiming(step=9, start=90.0, seconds=1.0, optimizer_seconds=0.1),
        sampled_spans=(span(LineName.FORWARD, 90.1, forward, step=9), span(LineName.BACKWARD, 90.4, 0.5, step=9)),
        collectives=calls,
        memory=MemoryPeak(parts={MemoryPart.PARAMETERS: 5.0 + rank}),
    )


def seconds(report: Report) -> dict[str, float]:
    return {line.name: line.seconds for line in report.step.lines}


def test_collectives_come_out_of_the_spans_they_ran_in() -> None:
    report = measured_report(
        plan=plan(AxisName.SHARD), predicted=PREDICTED, ranks=[data_rank(0, forward=0.2), data_rank(1, forward=0.25)]
    )
    found = seconds(report)
    assert report.balanced
    assert report.step_seconds == pytest.approx(1.0)  # the median: one slow step does not move it
    assert found[LineName.FORWARD] == pytest.approx(0.25)  # of the busiest rank
    assert found[LineName.BACKWARD] == pytest.approx(0.2)
    assert found[LineName.PARAMETERS] == pytest.approx(0.1)
    assert found[LineName.GRADIENTS] == pytest.approx(0.2)
    assert found[LineName.OPTIMIZER] == pytest.approx(0.1)
    assert found[LineName.INPUT] == pytest.approx(0.05)
    assert found[LineName.OTHER] == pytest.approx(1.0 - 0.25 - 0.5 - 0.1 - 0.05)
    assert all(line.origin is Origin.MEASURED for line in report.step.lines)
    assert report.step.find(LineName.GRADIENTS).bytes == 128  # type: ignore[union-attr]  # the line is there
    assert report.memory == (StageMemory(rank=0, parts={"parameters": 6.0}, capacity=10.0),)
    assert "above the mean" in " ".join(report.notes)


def test_parts_whose_medians_are_more_than_the_median_step_leave_nothing_below_zero() -> None:
    """Of three steps of 1 s each part is long in two, and never all of them."""
    long = ((0.5, 0.5, 0.0), (0.5, 0.0, 0.5), (0.0, 0.5, 0.5))
    sample = RankSample(
        rank=0,
        timings=tuple(
            StepTiming(step=step, start=10.0 * step, seconds=1.0, optimizer_seconds=last)
            for step, (_, _, last) in enumerate(long)
        ),
        spans=tuple(
            span(name, 10.0 * step + start, seconds, step=step)
            for step, (first, second, _) in enumerate(long)
            for name, start, seconds in ((LineName.FORWARD, 0.0, first), (LineName.BACKWARD, 0.5, second))
        ),
    )
    report = measured_report(plan=plan(AxisName.SHARD), predicted=PREDICTED, ranks=[sample])
    found = seconds(report)
    assert report.step_seconds == pytest.approx(1.0)
    assert [found[name] for name in (LineName.FORWARD, LineName.BACKWARD, LineName.OPTIMIZER)] == pytest.approx(
        [1 / 3] * 3
    )
    assert found[LineName.OTHER] == pytest.approx(0.0, abs=1e-12)


def test_an_instrumented_step_that_was_slower_scales_its_waits() -> None:
    slowed = data_rank(0, forward=0.2)
    slowed = replace(slowed, sampled=StepTiming(step=9, start=90.0, seconds=2.0))
    found = seconds(measured_report(plan=plan(AxisName.SHARD), predicted=PREDICTED, ranks=[slowed]))
    assert found[LineName.PARAMETERS] == pytest.approx(0.05)
    assert found[LineName.GRADIENTS] == pytest.approx(0.1)
    assert found[LineName.BACKWARD] == pytest.approx(0.35)


def test_recompute_is_taken_out_of_backward() -> None:
    sample = replace(data_rank(0, forward=0.2), recompute_seconds=0.15)
    found = seconds(measured_report(plan=plan(AxisName.SHARD), predicted=PREDICTED, ranks=[sample]))
    assert found[LineName.RECOMPUTE] == pytest.approx(0.15)
    assert found[LineName.BACKWARD] == pytest.approx(0.05)


def pipeline_rank(rank: int, spans: list[Span], *, offset: float = 0.0) -> RankSample:
    return RankSample(
        rank=rank,
        timings=(StepTiming(step=5, start=-offset, seconds=1.0),),
        spans=tuple(replace(span, start=span.start - offset) for span in spans),
        clock_offset=offset,
    )


def test_idle_time_of_a_pipeline_is_transfer_once_its_input_was_made() -> None:
    first = [
        span(LineName.FORWARD, 0.0, 0.2, step=5, stage=0),
        span(LineName.BACKWARD, 0.7, 0.3, step=5, stage=0),
    ]
    second = [
        span(LineName.FORWARD, 0.25, 0.15, step=5, stage=1),
        span(LineName.BACKWARD, 0.4, 0.2, step=5, stage=1),
    ]
    ranks = [pipeline_rank(0, first), pipeline_rank(1, second, offset=100.0)]
    report = measured_report(plan=plan(AxisName.PIPELINE), predicted=PREDICTED, ranks=ranks)
    found = seconds(report)
    assert report.balanced
    assert found[LineName.FORWARD] == pytest.approx(0.2)
    assert found[LineName.BACKWARD] == pytest.approx(0.3)
    # Rank 0 has nothing to do from 0.2 until B1 ends at 0.6; its gradient arrives at 0.7.
    assert found[LineName.BUBBLE] == pytest.approx(0.4)
    assert found[LineName.TRANSFER] == pytest.approx(0.1)
    assert found[LineName.OTHER] == pytest.approx(0.0, abs=1e-9)


def test_a_gradient_is_made_when_the_first_half_of_a_backward_ends() -> None:
    first = [
        span(LineName.FORWARD, 0.0, 0.2, step=5, stage=0),
        span(LineName.BACKWARD, 0.7, 0.2, step=5, stage=0),
        span(LineName.BACKWARD, 0.9, 0.1, step=5, stage=0),
    ]
    second = [
        span(LineName.FORWARD, 0.25, 0.15, step=5, stage=1),
        span(LineName.BACKWARD, 0.4, 0.2, step=5, stage=1),
        span(LineName.BACKWARD, 0.65, 0.1, step=5, stage=1),
    ]
    found = seconds(
        measured_report(
            plan=plan(AxisName.PIPELINE),
            predicted=PREDICTED,
            ranks=[pipeline_rank(0, first), pipeline_rank(1, second)],
        )
    )
    assert found[LineName.BUBBLE] == pytest.approx(0.4)
    assert found[LineName.TRANSFER] == pytest.approx(0.1)


def test_no_measured_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rank"):
        measured_report(plan=plan(AxisName.SHARD), predicted=PREDICTED, ranks=[RankSample(rank=0, timings=())])


def run_steps(profiler: Profiler, *, count: int, first: int = 0, part: nn.Module | None = None) -> None:
    part = nn.Linear(64, 64, bias=False) if part is None else part
    optimizer = torch.optim.AdamW(part.parameters())
    profiler.watch(parts=[part], optimizer=optimizer)
    for step in range(first, first + count):
        with profiler.step(step):
            with profiler.section(LineName.INPUT):
                x = torch.randn(32, 64)
            start = time.perf_counter()
            loss = part(x).square().sum()
            middle = time.perf_counter()
            loss.backward()
            profiler.record(LineName.FORWARD, start, middle - start, stage=0, microbatch=0)
            profiler.record(LineName.BACKWARD, middle, time.perf_counter() - middle, stage=0, microbatch=0)
            with profiler.section(LineName.OPTIMIZER):
                optimizer.step()
                optimizer.zero_grad()


def test_a_run_of_one_rank_measures_itself() -> None:
    profiler = Profiler(
        design(model(), Layout()), rank=0, device=torch.device("cpu"), sampling=Sampling(warmup=1, collectives_step=2)
    )
    run_steps(profiler, count=8)
    assert [step for step in range(8) if profiler.instrumented(step)] == [2, 3]
    sample = profiler.sample()
    assert [timing.step for timing in sample.timings] == [1, 4, 5, 6, 7]
    assert sample.memory is not None
    assert sample.memory.parts[MemoryPart.PARAMETERS] == 64 * 64 * 4
    assert sample.memory.parts[MemoryPart.OPTIMIZER] >= 2 * 64 * 64 * 4
    report = profiler.report(PREDICTED)
    assert report is not None
    assert report.balanced
    found = seconds(report)
    assert found[LineName.FORWARD] > 0.0
    assert found[LineName.BACKWARD] > 0.0
    assert found[LineName.OPTIMIZER] > 0.0
    assert report.memory[0].allocated == sample.memory.total


class Layer(nn.Module):
    """A layer of its own code, so that no other test has compiled it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


def test_what_is_compiled_stays_so_after_the_steps_under_instruments() -> None:
    ran, steps = 0, []
    compiled = replace(design(model(), Layout()), job=replace(design(model(), Layout()).job, compile=Switch.ON))
    profiler = Profiler(
        compiled, rank=0, device=torch.device("cpu"), sampling=Sampling(warmup=1, collectives_step=2, memory_step=3)
    )

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal ran
            ran += 1
            return graph(*args)

        return run

    layer = Layer()
    layer.compile(backend=backend)
    for step in range(7):
        before = ran
        run_steps(profiler, count=1, first=step, part=layer)
        steps += [step] * (ran - before)
    assert steps == [0, 1, 4, 5, 6]
    sample = profiler.sample()
    assert sample.memory is not None
    assert sample.memory.parts[MemoryPart.PARAMETERS] == 64 * 64 * 4
    assert sample.memory.note.endswith(AS_WRITTEN_NOTE)


@pytest.mark.parametrize(
    ("allocated", "parts"),
    [
        (12.0, {MemoryPart.PARAMETERS: 4.0, MemoryPart.ACTIVATIONS: 5.0, MemoryPart.BUFFERS: 3.0}),
        (7.0, {MemoryPart.PARAMETERS: 4.0, MemoryPart.ACTIVATIONS: 2.0, MemoryPart.BUFFERS: 1.0}),
    ],
    ids=["more than operators returned", "less, as compiled layers do"],
)
def test_parts_sum_to_what_the_allocator_had(allocated: float, parts: dict[str, float]) -> None:
    seen = MemoryPeak(parts={MemoryPart.PARAMETERS: 4.0, MemoryPart.ACTIVATIONS: 5.0, MemoryPart.BUFFERS: 1.0})
    found = of_allocator(seen, allocated)
    assert found.parts == parts
    assert found.total == allocated


def test_a_run_too_short_to_measure_has_no_report() -> None:
    profiler = Profiler(design(model(), Layout()), rank=0, device=torch.device("cpu"), sampling=Sampling())
    run_steps(profiler, count=2)
    assert profiler.report(PREDICTED) is None


def test_recompute_is_timed_by_modules_called_in_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    from meshwright.train.observe.recompute import RecomputeClock

    part = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    x = torch.randn(512, 256, requires_grad=True)
    clock = RecomputeClock([part])
    with clock.watching():
        out = checkpoint(part, x, use_reentrant=False)
        assert clock.seconds == 0.0
        out.sum().backward()
    first = clock.seconds
    assert first > 0.0
    with clock.watching():
        part(x).sum().backward()
    assert clock.seconds == first
