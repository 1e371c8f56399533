"""A dry run as rows for people: every figure predicted and counted, and what differs in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.report.figure import Table
from meshwright.spec.report import Gap, Report
from meshwright.spec.units import format_bytes, format_flops, format_percent

LEAST = 0.001  # a difference that is told by its size
SMALL = 0.005  # memory that is predicted within so much of what is counted is told as told


@dataclass(frozen=True, slots=True, kw_only=True)
class DryView:
    """Tables of one dry run, and sentences: whether it fits, and what differs."""

    title: str
    plan: str
    sentences: tuple[str, ...]
    work: Table
    collectives: Table
    memory: Table
    notes: tuple[str, ...]


def dry_view(counted: Report, gaps: Sequence[Gap], *, plan: str) -> DryView:
    """What the terminal and the page show of a dry run."""
    work = [gap for gap in gaps if not gap.name.startswith("rank ")]
    memory = [gap for gap in gaps if gap.name.startswith("rank ")]
    rank = int(counted.detail.get("shown rank", 0.0))
    headers = ("", "predicted", "counted", "difference")
    return DryView(
        title=f"One step of pipeline rank {rank}",
        plan=plan,
        sentences=(_fits(counted), *_differences(work), *_memory_words(memory)),
        work=Table(headers=("line", *headers[1:]), rows=tuple(_row(gap) for gap in work)),
        collectives=Table(headers=("collective", "calls", "bytes"), rows=tuple(_calls(counted)), words=1),
        memory=Table(headers=("memory at the peak", *headers[1:]), rows=tuple(_row(gap) for gap in _shown(memory))),
        notes=counted.notes,
    )


def _fits(counted: Report) -> str:
    stage = counted.tightest
    sizes = f"{format_bytes(stage.total)} of {format_bytes(stage.capacity)} on pipeline rank {stage.rank}"
    words = f"fits: {'yes' if counted.fits else 'no'}; the fullest device holds {sizes} at its peak"
    if stage.host_capacity is None or stage.host <= stage.host_capacity:
        return words
    return (
        f"{words}, and {format_bytes(stage.host)} of the {format_bytes(stage.host_capacity)} that it has of the host's"
    )


def _differences(gaps: Sequence[Gap]) -> Iterator[str]:
    for gap in gaps:
        if gap.measured == gap.predicted:
            continue
        if not gap.predicted:
            yield f"{gap.name}: {_amount(gap.measured, gap.unit)} counted, which the prediction does not tell"
        elif not gap.measured:
            yield f"{gap.name}: {_amount(gap.predicted, gap.unit)} predicted, and none counted"
        else:
            yield f"{gap.name}: {_relative(gap)} counted than predicted"


def _memory_words(gaps: Sequence[Gap]) -> Iterator[str]:
    peaks = [gap for gap in gaps if gap.name.endswith(" peak") and gap.measured]
    worst = max(peaks, key=lambda gap: abs(gap.measured - gap.predicted) / gap.measured, default=None)
    if worst is None:
        return
    off = abs(worst.measured - worst.predicted) / worst.measured
    if off <= SMALL:
        yield f"memory: every peak is predicted within {format_percent(SMALL)} of what is counted"
    else:
        yield f"memory: the peak of {worst.name.removesuffix(' peak')} differs most, {_relative(worst)} than predicted"
    yield from _part_words(gaps, {gap.name.removesuffix("peak"): gap.measured for gap in peaks})


def _part_words(gaps: Sequence[Gap], peaks: Mapping[str, float]) -> Iterator[str]:
    """The part that differs most against the peak of its rank: parts that are told wrong may cancel in their sum."""
    found = []
    for gap in gaps:
        rank = next((rank for rank in peaks if gap.name.startswith(rank)), None)
        if rank is not None and not gap.name.endswith(" peak"):
            found.append((abs(gap.measured - gap.predicted) / peaks[rank], gap))
    share, worst = max(found, key=lambda entry: entry[0], default=(0.0, None))
    if worst is None or share <= SMALL:
        return
    size = _amount(abs(worst.measured - worst.predicted), worst.unit)
    word = "more" if worst.measured > worst.predicted else "less"
    peak = next(gap for gap in gaps if gap.name.endswith(" peak") and worst.name.startswith(gap.name[: -len("peak")]))
    agrees = abs(peak.measured - peak.predicted) <= SMALL * peak.measured
    why = "; the peak itself agrees: it is told at another moment that is as high, or by another name" if agrees else ""
    yield (
        f"parts of memory: {worst.name} differs most, {size} {word} counted than predicted, {format_percent(share)} of "
        f"the rank's peak{why}"
    )


def _relative(gap: Gap) -> str:
    share = abs(gap.measured - gap.predicted) / max(abs(gap.predicted), 1e-300)
    return f"{format_percent(share)} {'more' if gap.measured > gap.predicted else 'less'}"


def _shown(gaps: Sequence[Gap]) -> Sequence[Gap]:
    """Of many pipeline ranks the peaks, and every part of the first, the last and the fullest."""
    peaks = [gap for gap in gaps if gap.name.endswith(" peak")]
    fullest = max(peaks, key=lambda gap: gap.measured, default=None)
    whole = {peaks[0].name, peaks[-1].name, fullest.name} if peaks and fullest else set()
    ranks = {name.removesuffix("peak") for name in whole}
    return [gap for gap in gaps if gap.name.endswith(" peak") or any(gap.name.startswith(rank) for rank in ranks)]


def _row(gap: Gap) -> tuple[str, ...]:
    difference = "same" if gap.measured == gap.predicted else _signed(gap)
    return (gap.name, _amount(gap.predicted, gap.unit), _amount(gap.measured, gap.unit), difference)


def _signed(gap: Gap) -> str:
    if not gap.predicted:
        return "+" + _amount(gap.measured, gap.unit)
    share = gap.measured / gap.predicted - 1.0
    if abs(share) < LEAST:
        return f"< {format_percent(LEAST)}"
    return f"{'+' if share > 0 else '-'}{format_percent(abs(share))}"


def _amount(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "B" else format_flops(value)


def _calls(counted: Report) -> Iterator[tuple[str, ...]]:
    for line in counted.step.lines:
        for each in line.lines:
            yield (
                f"{line.name}: {each.name}",
                each.note.removesuffix(" calls").removesuffix(" call"),
                f"{each.bytes:,.0f}",
            )
