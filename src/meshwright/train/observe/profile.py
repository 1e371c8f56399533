"""Profiler: times every step lightly, runs two under instruments, and makes the measured Report of the run."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.spec.job import Switch
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.report import LineName, MemoryPart, Report
from meshwright.spec.span import Recorder, Silent, Span
from meshwright.train.observe.collectives import CollectiveTimer
from meshwright.train.observe.measured import measured_report
from meshwright.train.observe.memory import AS_WRITTEN_NOTE, MemoryTracker, of_allocator
from meshwright.train.observe.recompute import RecomputeClock
from meshwright.train.observe.samples import CollectiveCall, RankSample, StepTiming, local_vocab
from meshwright.train.torch_compat import as_written


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Which steps are what: `warmup` steps are timed by nobody, one runs under the timer of collectives, one under
    the memory tracker; the spans of the newest `kept_steps` plain steps are kept for the report."""

    warmup: int = 2
    collectives_step: int = 2
    memory_step: int = 3
    kept_steps: int = 64

    @classmethod
    def after(cls, first_step: int) -> Sampling:
        """Sampling for a run whose first step is `first_step`, as when it resumes."""
        plain = cls()
        return replace(
            plain,
            warmup=first_step + plain.warmup,
            collectives_step=first_step + plain.collectives_step,
            memory_step=first_step + plain.memory_step,
        )


class Profiler:
    """The Recorder to hand to parallel.lay, and the clock around every step of one rank.

    Use: make it, lay the model with `recorder=profiler`, call `watch` with what was laid, then in every step

        with profiler.step(step):
            with profiler.section(LineName.INPUT): ...
            loss = laid.step(...)
            with profiler.section(LineName.OPTIMIZER): ...

    and `report()` on every rank at the end. Plain steps cost two clock reads a section. `onward` is given every span
    too, so that a file of spans can be written beside.
    """

    def __init__(
        self, design: Design, *, rank: int, device: torch.device, sampling: Sampling, onward: Recorder | None = None
    ) -> None:
        self._design = design
        self._rank = rank
        self._device = device
        self._sampling = sampling
        self._onward = onward if onward is not None else Silent()
        self._parts: tuple[nn.Module, ...] = ()
        self._optimizer: torch.optim.Optimizer | None = None
        self._timings: deque[StepTiming] = deque(maxlen=sampling.kept_steps)
        self._spans: deque[tuple[Span, ...]] = deque(maxlen=sampling.kept_steps)
        self._current: list[Span] = []
        self._sections: dict[LineName, float] = {}
        self._step = -1
        self._tracker: MemoryTracker | None = None
        self._sample = RankSample(rank=rank, timings=())
        self._allocated: float | None = None

    def watch(self, *, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Says whose memory is measured; without it the memory step is a plain one."""
        self._parts, self._optimizer = tuple(parts), optimizer

    def begin_again(self, design: Design, *, first_step: int) -> None:
        """What was seen is forgotten: from step `first_step` on the run is of another design."""
        self._design, self._sampling = design, Sampling.after(first_step)
        self._sample = RankSample(rank=self._rank, timings=())
        self._timings.clear()
        self._spans.clear()

    def instrumented(self, step: int) -> bool:
        """Whether instruments slow this step, so that its time says nothing of the run's speed."""
        return step == self._sampling.collectives_step or (step == self._sampling.memory_step and bool(self._parts))

    def record(self, name: str, start: float, seconds: float, *, stage: int = -1, microbatch: int = -1) -> None:
        """Keeps one span of the current step; the clock is time.perf_counter()."""
        span = Span(
            name=name,
            rank=self._rank,
            start=start,
            seconds=seconds,
            stage=stage,
            microbatch=microbatch,
            step=self._step,
        )
        self._current.append(span)
        self._onward.record(name, start, seconds, stage=stage, microbatch=microbatch)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Times one step; runs it under an instrument when it is one of the sampled ones."""
        self._step, self._sections = step, {}
        self._current.clear()
        with ExitStack() as stack:
            timer, clock = self._instruments(step, stack)
            self._finish_device()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            start = time.perf_counter()
            yield
            self._finish_device()
            seconds = time.perf_counter() - start
        timing = StepTiming(
            step=step,
            start=start,
            seconds=seconds,
            input_seconds=self._sections.get(LineName.INPUT, 0.0),
            optimizer_seconds=self._sections.get(LineName.OPTIMIZER, 0.0),
        )
        if timer is not None:
            calls = timer.calls_among(self._current)
            self._keep_collectives(timing, calls, clock.seconds if clock else 0.0)
        elif self._tracker is not None:
            self._sample = replace(self._sample, memory=self._tracker.peak())
            self._tracker, self._allocated = None, self._allocator_peak()
        elif step >= self._sampling.warmup:
            self._timings.append(timing)
            self._spans.append(tuple(self._current))
            self._allocated = self._allocator_peak()

    @contextmanager
    def section(self, name: LineName) -> Iterator[None]:
        """Times the input or the optimizer section of the current step."""
        if name is LineName.OPTIMIZER and self._tracker is not None:
            self._tracker.mark_owned()
        self._finish_device()
        start = time.perf_counter()
        yield
        self._finish_device()
        self._sections[name] = self._sections.get(name, 0.0) + time.perf_counter() - start

    def seconds_in(self, name: LineName) -> float:
        """Of the newest step, what its section of this name took."""
        return self._sections.get(name, 0.0)

    def sample(self) -> RankSample:
        """What this rank has seen until now."""
        spans = tuple(span for step in self._spans for span in step)
        memory = self._sample.memory
        if memory is not None and self._allocated is not None:
            memory = of_allocator(memory, self._allocated)
        if memory is not None and self._design.job.compile is not Switch.OFF:
            memory = replace(memory, note=f"{memory.note}; {AS_WRITTEN_NOTE}")
        return replace(self._sample, timings=tuple(self._timings), spans=spans, memory=memory)

    def report(self, predicted: Report) -> Report | None:
        """The measured Report on rank 0, None on the others; every rank must call it, at the same point.

        None on rank 0 as well when no plain step was run. `predicted` gives the counts and capacities that no clock
        measures.
        """
        sample = replace(self.sample(), clock_offset=self._clock_offset())
        gathered: list[RankSample | None] = [None] * self._design.plan.world_size
        if dist.is_initialized():
            dist.gather_object(sample, gathered if self._rank == 0 else None, dst=0)
        else:
            gathered = [sample]
        ranks = [entry for entry in gathered if entry is not None and entry.timings]
        if self._rank != 0 or not ranks:
            return None
        return measured_report(plan=self._design.plan, predicted=predicted, ranks=ranks)

    def _instruments(self, step: int, stack: ExitStack) -> tuple[CollectiveTimer | None, RecomputeClock | None]:
        if not self.instrumented(step):
            return None, None
        stack.enter_context(as_written())
        if step == self._sampling.collectives_step:
            synchronize: Any = torch.cuda.synchronize if self._device.type == "cuda" else None
            clock = stack.enter_context(RecomputeClock(self._parts).watching())
            timer = CollectiveTimer(self._design.plan, synchronize=synchronize)
            return stack.enter_context(timer.watching()), clock
        plan = self._design.plan
        freed = all(group.sharding is Sharding.PARAMETERS for group in plan.groups)
        tracker = MemoryTracker(
            parts=self._parts,
            optimizer=self._optimizer,
            vocab=local_vocab(self._design, rank=self._rank),
            gathered=MemoryPart.BUFFERS if freed else MemoryPart.PARAMETERS,
        )
        self._tracker = stack.enter_context(tracker.watching())
        return None, None

    def _keep_collectives(self, timing: StepTiming, calls: tuple[CollectiveCall, ...], recompute: float) -> None:
        self._sample = replace(
            self._sample,
            sampled=timing,
            sampled_spans=tuple(self._current),
            collectives=calls,
            recompute_seconds=recompute,
        )

    def _allocator_peak(self) -> float | None:
        """Most bytes of the allocator in the newest step, on an accelerator."""
        return float(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else None

    def _finish_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _clock_offset(self) -> float:
        """Seconds to add to this host's clock to read rank 0's; 0 on rank 0's host, whose processes share a clock."""
        if not dist.is_initialized():
            return 0.0
        dist.barrier()
        mine = (socket.gethostname(), time.perf_counter())
        clocks: list[tuple[str, float] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(clocks, mine)
        first = clocks[0]
        return 0.0 if first is None or first[0] == mine[0] else first[1] - mine[1]
