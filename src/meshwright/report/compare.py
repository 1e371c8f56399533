"""Two plans side by side: settings that differ, the step cause by cause, memory part by part, and which is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.report.differences import differences
from meshwright.report.loss_gap import LossGap, loss_gap
from meshwright.report.run_files import RunFiles, read_run
from meshwright.report.waterfall import Waterfall, waterfall
from meshwright.spec.plan import Plan
from meshwright.spec.report import MemoryPart, Origin, Report
from meshwright.spec.units import LEAST_SHARE, format_bytes, format_count, format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two: its name, the report that is compared and the step as a waterfall."""

    name: str
    plan: Plan
    report: Report
    waterfall: Waterfall


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One figure of both sides: seconds of a cause, or bytes of a part at the fullest rank's peak."""

    name: str
    one: float
    other: float

    @property
    def difference(self) -> float:
        """The second less the first."""
        return self.other - self.one


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides; `settings` maps what differs to the values of both as text.

    `origin` is measured where both runs were, else what a prediction is from. `loss_gap` is of the other to the one, of
    runs that learned from the same text.
    """

    one: Side
    other: Side
    origin: Origin
    verdict: str
    settings: dict[str, tuple[str, str]]
    step: tuple[Pair, ...]
    memory: tuple[Pair, ...]
    loss_gap: LossGap | None = None


def compare(one: Path | str, other: Path | str) -> Comparison:
    """The two designs (files that plan wrote, or run directories) compared.

    Two runs that were both measured are compared by their measurements, everything else by predictions. Raises
    ConfigError when one cannot be read.
    """
    files = read_run(one), read_run(other)
    measured = all(entry.measured is not None for entry in files)
    names = [entry.name for entry in files]
    if names[0] == names[1]:
        names = [str(one), str(other)]
    if names[0] == names[1]:
        names = ["one", "the other"]
    gap = loss_gap(files[1], files[0])
    first, second = (_side(name, entry, measured=measured) for name, entry in zip(names, files, strict=True))
    return Comparison(
        one=first,
        other=second,
        origin=Origin.MEASURED if measured else first.report.step.origin,
        verdict=_compared(files, first, second, measured=measured),
        settings=differences(*(entry.design for entry in files)),
        step=_steps(first.waterfall, second.waterfall),
        memory=_memory(first.report, second.report),
        loss_gap=None if gap is None else replace(gap, run=names[1], reference=names[0]),
    )


def _side(name: str, files: RunFiles, *, measured: bool) -> Side:
    report = files.measured if measured else files.predicted
    if report is None:
        from meshwright.cost import predict

        report = predict(files.design)
    return Side(name=name, plan=files.design.plan, report=report, waterfall=waterfall(report))


def _steps(one: Waterfall, other: Waterfall) -> tuple[Pair, ...]:
    """Bars of both in the order of a waterfall."""
    names = [bar.name for bar in one.bars]
    for index, bar in enumerate(other.bars):
        if bar.name not in names:
            before = other.bars[index - 1].name if index else None
            names.insert(names.index(before) + 1 if before else 0, bar.name)
    return tuple(Pair(name=name, one=one.seconds(name), other=other.seconds(name)) for name in names)


def _memory(one: Report, other: Report) -> tuple[Pair, ...]:
    ours, theirs = one.fullest, other.fullest
    parts = [
        Pair(name=part.value, one=ours.parts.get(part, 0.0), other=theirs.parts.get(part, 0.0))
        for part in MemoryPart
        if (ours.parts.get(part) or theirs.parts.get(part))
    ]
    return tuple(parts)


def _compared(files: Sequence[RunFiles], one: Side, other: Side, *, measured: bool) -> str:
    """The verdict; of different models there is none, since a token of one is not the work of a token of the other."""
    designs = [entry.design for entry in files]
    if designs[0].model != designs[1].model:
        ours, theirs = (f"{format_count(side.report.tokens_per_second)} tokens/s" for side in (one, other))
        names = [design.model.name for design in designs]
        models = f"{names[0]} and {names[1]}" if names[0] != names[1] else f"two models that are called {names[0]}"
        return f"No verdict: they train {models}. {one.name} trains {ours}, {other.name} {theirs}."
    verdict = _verdict(one, other, measured=measured, doubtful=not measured and _overlap(files, one, other))
    machines = [design.cluster for design in designs]
    if not measured and machines[0] != machines[1] and machines[0].name == machines[1].name:
        verdict += f" The figures of {machines[0].name} are others in the two, and so part of that is not the plans'."
    lengths = [design.plan.sequence_length for design in designs]
    if lengths[0] == lengths[1]:
        return verdict
    return f"{verdict} A token costs more in longer sequences: they have {lengths[0]:,} and {lengths[1]:,} tokens."


def _verdict(one: Side, other: Side, *, measured: bool, doubtful: bool) -> str:
    """Which is better, by how much, in what, and what it costs in memory: one sentence."""
    for side, rival in ((one, other), (other, one)):
        if not side.report.fits and rival.report.fits:
            return f"{rival.name} fits and {side.name} does not: it {side.report.tightest.need}."
    slow, fast = (one, other) if other.report.tokens_per_second >= one.report.tokens_per_second else (other, one)
    gain = fast.report.tokens_per_second / slow.report.tokens_per_second - 1.0 if slow.report.step_seconds else 0.0
    memory = _memory_words(one, other)
    if gain < LEAST_SHARE and one.report.tokens_per_step == other.report.tokens_per_step:
        return f"{one.name} and {other.name} {'took' if measured else 'take'} as long a step; {memory}."
    bands = "; the bands of the two predictions overlap" if doubtful else ""
    return f"{_speed_words(slow, fast, gain, measured=measured)}; {memory}{bands}."


def _speed_words(slow: Side, fast: Side, gain: float, *, measured: bool) -> str:
    """`b is 12.0 % faster than a (...), mostly in ...`; by tokens/s and devices where the steps do not do the same."""
    took = "took" if measured else "takes"
    if slow.report.tokens_per_step == fast.report.tokens_per_step and slow.plan.world_size == fast.plan.world_size:
        less = 1.0 - fast.report.step_seconds / slow.report.step_seconds
        steps = f"{format_seconds(fast.report.step_seconds)}, not {format_seconds(slow.report.step_seconds)}"
        said = f"{fast.name} {took} {format_percent(less)} less time a step than {slow.name} ({steps})"
        return said + _mostly(slow, fast)
    ours, theirs = (format_count(side.report.tokens_per_second) for side in (fast, slow))
    used = f"{fast.plan.world_size:,} device{'s' * (fast.plan.world_size > 1)}, not {slow.plan.world_size:,}"
    if fast.plan.world_size == slow.plan.world_size:
        used = "as many devices"
    return f"{fast.name} trains {1.0 + gain:.2f} times the tokens/s of {slow.name} ({ours}, not {theirs}) on {used}"


def _memory_words(one: Side, other: Side) -> str:
    left = other.report.peak_bytes - one.report.peak_bytes
    if abs(left) < 0.001 * max(one.report.peak_bytes, 1.0):
        return "both need as much memory"
    much = f"{other.name} needs {format_bytes(abs(left))} {'more' if left > 0 else 'less'} memory at the peak"
    surely, theirs = one.report.fit_probability, other.report.fit_probability
    if surely is None or theirs is None or abs(theirs - surely) < LEAST_SHARE:
        return much
    return f"{much} and fits with {format_percent(theirs)}, not {format_percent(surely)}"


def _overlap(files: Sequence[RunFiles], one: Side, other: Side) -> bool:
    """Whether the bands cross where the machines differ: on the same machines errors are shared and orders hold."""
    if files[0].design.cluster == files[1].design.cluster:
        return False
    (low, high), (under, over) = (
        tuple(side.report.step_seconds * bound for bound in side.report.error_band) for side in (one, other)
    )
    return low < over and under < high


def _mostly(slow: Side, fast: Side) -> str:
    pairs = _steps(slow.waterfall, fast.waterfall)
    first = min(pairs, key=lambda pair: pair.difference, default=None)
    if first is None or first.difference >= 0:
        return ""
    return f", mostly in {first.name} ({format_seconds(first.difference)})"
