"""Predicted against measured in words, the worst line first; of a plan, what its step is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.cost.predict import left_out
from meshwright.report.loss_gap import LossGap, loss_gap, meets_otherwise, twin
from meshwright.report.meetings import Meetings, Way, meetings, ways_cells
from meshwright.report.run_files import RunFiles, read_run
from meshwright.search.low_rank import advise_low_rank, foresee_low_rank
from meshwright.spec.report import Gap, Line, LineName, Report, diff
from meshwright.spec.units import format_bytes, format_interval, format_percent, format_seconds

UNKNOWN = "N/A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the step: seconds predicted and measured, None where not known, and the same in words.

    `share` is of the measured step, or of the predicted one where nothing is measured.
    """

    name: str
    predicted: float | None
    measured: float | None
    share: float | None
    words: str

    @property
    def gap(self) -> float | None:
        """Measured less predicted, in seconds."""
        return None if self.predicted is None or self.measured is None else self.measured - self.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Allocated bytes of the heaviest device of one pipeline rank."""

    rank: int
    predicted: float | None
    measured: float | None
    capacity: float | None
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a run or a plan costs and why. Encodes to JSON with `spec.codec.encode`.

    `loss_gap` is of a run whose ranks do not meet whole in every step, to one beside it whose ranks do; `ways` are the
    plan's way of meeting and others for its layout.
    """

    name: str
    plan: str
    headline: str
    sentences: tuple[str, ...]
    rows: tuple[Row, ...]
    memory: tuple[MemoryRow, ...]
    loss_gap: LossGap | None = None
    ways: tuple[Way, ...] = ()

    def lines(self, *, ways: bool = True) -> tuple[str, ...]:
        """The explanation as lines of text: headline, sentences, `ways` to meet, then the step and memory.

        Where nothing was measured, or nothing predicted, the other is the only column.
        """
        table = [("", "predicted", "measured", "gap")]
        table += [
            (row.name, _seconds(row.predicted), _seconds(row.measured), signed_seconds(row.gap)) for row in self.rows
        ]
        for entry in self.memory:
            gap = None if entry.predicted is None or entry.measured is None else entry.measured - entry.predicted
            name = f"memory allocated, pipeline rank {entry.rank}"
            table.append((name, _bytes(entry.predicted), _bytes(entry.measured), signed_bytes(gap)))
        known = [column == 0 or any(cells[column] != UNKNOWN for cells in table[1:]) for column in range(4)]
        kept = [[cell for cell, shown in zip(cells, known, strict=True) if shown] for cells in table]
        meetings = ("", *_aligned(ways_cells(self.ways))) if ways and self.ways else ()
        return (f"{self.name}: {self.plan}", self.headline, *self.sentences, *meetings, "", *_aligned(kept))


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines: names on the left, figures on the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join((cells[0].ljust(widths[0]), *_right(cells[1:], widths[1:]))).rstrip() for cells in table]


def explain(path: Path | str) -> Explanation:
    """What the run directory or the plan file at `path` cost and why. Raises ConfigError when it cannot be read."""
    return explain_files(read_run(path))


def explain_files(files: RunFiles) -> Explanation:
    """As `explain`, of files read already."""
    predicted, measured, reference = files.predicted, files.measured, twin(files)
    gap = loss_gap(files, reference) if reference is not None else None
    met = Meetings() if predicted is None else meetings(files.design, predicted, every=files.round_steps)
    if predicted is not None and measured is not None:
        headline, sentences = _compared(predicted, measured)
        rows = tuple(
            _gap_row(gap, predicted, measured) for gap in diff(predicted, measured) if gap.predicted or gap.measured
        )
    elif predicted is not None or measured is not None:
        report = predicted or measured
        assert report is not None
        headline, sentences = _alone(report, is_measured=measured is not None)
        rows = _rows_alone(report, is_measured=measured is not None)
    else:
        headline, sentences, rows = "nothing is predicted or measured yet", (), ()
    if predicted is not None:
        others = (*_quality(files, gap), *_low_rank(files, predicted), *_reserved(predicted))
        sentences = (*sentences, *_skipped(files), *met.sentences, *_told(files.rounds), *others)
    if predicted is not None and measured is None and not files.is_plan:
        sentences = (*sentences, "The run has not measured a step yet.")
    return Explanation(
        name=files.name,
        plan=files.design.plan.describe(),
        headline=headline,
        sentences=sentences,
        rows=rows,
        memory=_memory(predicted, measured),
        loss_gap=gap,
        ways=met.ways,
    )


def _low_rank(files: RunFiles, predicted: Report) -> tuple[str, ...]:
    """What the gate of low rank training predicts, and what a job that asks for none misses."""
    lines = (*foresee_low_rank(files.design), *advise_low_rank(files.design, predicted))
    return tuple(f"{line[:1].upper()}{line[1:]}." for line in lines)


def _skipped(files: RunFiles) -> tuple[str, ...]:
    """That microbatches of the plan leave out stages, and what is not known of that."""
    plan = files.design.plan
    return _told(left_out(plan)) if plan.schedule.paths else ()


def _told(text: str) -> tuple[str, ...]:
    return (_sentence(text),) if text else ()


def _quality(files: RunFiles, gap: LossGap | None) -> tuple[str, ...]:
    """What the way in which a run's ranks meet cost in loss, as it was measured."""
    if files.is_plan or not meets_otherwise(files.design):
        return ()
    if gap is not None:
        beside = f"Measured beside {gap.reference}, whose ranks meet whole in every step"
        return (f"{beside}: the validation loss lies {gap.words}.",)
    return (
        "What that costs in loss is not measured: no run in the same folder meets whole in every step, learns the same "
        "from the same batches and was evaluated.",
    )


def signed_seconds(seconds: float | None) -> str:
    """`+41.0 ms`; N/A for None."""
    if seconds is None:
        return UNKNOWN
    return f"{'+' if seconds >= 0 else ''}{format_seconds(seconds)}"


def signed_bytes(count: float | None) -> str:
    if count is None:
        return UNKNOWN
    return f"{'+' if count >= 0 else ''}{format_bytes(count)}"


def _compared(predicted: Report, measured: Report) -> tuple[str, tuple[str, ...]]:
    gap = measured.step_seconds - predicted.step_seconds
    took, said = format_seconds(measured.step_seconds), format_seconds(predicted.step_seconds)
    ratio = abs(gap) / predicted.step_seconds if predicted.step_seconds else 0.0
    if ratio < 0.02:
        headline = f"The step took {took}, as predicted ({said})."
    elif gap > predicted.step_seconds > 0:
        headline = f"The step took {took}, {1.0 + ratio:.3g} times the {said} predicted."
    else:
        word = "longer" if gap > 0 else "less"
        headline = f"The step took {took}, {format_percent(ratio)} {word} than the {said} predicted."
    sentences = []
    low, high = predicted.error_band
    if high > low:
        inside = low <= measured.step_seconds / max(predicted.step_seconds, 1e-12) <= high
        band = format_interval(low * predicted.step_seconds, high * predicted.step_seconds)
        sentences.append(f"That is {'inside' if inside else 'outside'} the interval for nine in ten, {band}.")
    sentences += _worst(diff(predicted, measured)[1:], step=predicted.step_seconds, gap=gap)
    if measured.bottleneck:
        sentences.append(_sentence(f"measured bottleneck: {measured.bottleneck}"))
    return headline, tuple(sentences)


def _worst(gaps: tuple[Gap, ...], *, step: float, gap: float) -> list[str]:
    """The largest gap in the direction of the whole, then the largest against it, where they matter."""
    along = [entry for entry in gaps if entry.seconds * gap > 0]
    against = [entry for entry in gaps if entry.seconds * gap < 0 and entry.predicted]
    found = []
    if along and abs(along[0].seconds) > 0.01 * step:
        share = min(1.0, along[0].seconds / gap) if gap else 0.0
        lead = "Most of the difference" if share > 0.5 else "The largest part of the difference"
        found.append(f"{lead} is {along[0].name}: {_change(along[0])}.")
    if against and abs(against[0].seconds) > 0.01 * step:
        found.append(f"The other way goes {against[0].name}: {_change(against[0])}.")
    return found


def _change(gap: Gap) -> str:
    word = "more" if gap.seconds >= 0 else "less"
    if not gap.predicted:
        return f"{format_seconds(gap.measured)} that the prediction does not have"
    return f"{format_seconds(abs(gap.seconds))} {word} than {format_seconds(gap.predicted)}"


def _gap_row(gap: Gap, predicted: Report, measured: Report) -> Row:
    known = predicted.step.find(gap.name) is not None
    seen = measured.step.find(gap.name) is not None
    share = gap.measured / measured.step_seconds if measured.step_seconds and seen else None
    words = f"{gap.name} took {format_seconds(gap.measured)}: {_change(gap)}" if seen else f"{gap.name}: not measured"
    return Row(
        name=gap.name,
        predicted=gap.predicted if known else None,
        measured=gap.measured if seen else None,
        share=share,
        words=words,
    )


def _alone(report: Report, *, is_measured: bool) -> tuple[str, tuple[str, ...]]:
    step, speed = format_seconds(report.step_seconds), f"{report.tokens_per_second:,.0f} tokens/s"
    mfu = f"MFU {format_percent(report.mfu)}" if report.mfu is not None else "MFU N/A, the peak is not known"
    headline = f"A step {'took' if is_measured else 'takes'} {step}: {speed}, {mfu}."
    lines = sorted(report.step.lines, key=lambda line: -line.seconds)[:3]
    parts = ", ".join(f"{line.name} {format_percent(line.seconds / report.step_seconds)}" for line in lines)
    sentences = [f"Of it: {parts}."] if parts and report.step_seconds else []
    low, high = report.error_band
    if high > low:
        ends = format_interval(low * report.step_seconds, high * report.step_seconds)
        sentences.append(f"Nine of ten such steps take {ends}.")
    sentences += _doubts(report)
    if report.bottleneck:
        sentences.append(_sentence(f"bottleneck: {report.bottleneck}"))
    if not report.fits:
        sentences.append("It does not fit in memory.")
    sentences += _outlook(report)
    return headline, tuple(sentences)


def _doubts(report: Report) -> tuple[str, ...]:
    """What most of the interval's width is of, as shares of its variance."""
    whole = sum(each**2 for each in report.doubts.values())
    if not whole:
        return ()
    most = sorted(report.doubts.items(), key=lambda entry: -entry[1])[:3]
    words = ", ".join(f"{format_percent(each**2 / whole)} {cause}" for cause, each in most)
    return (f"What widens that: {words}.",)


def _outlook(report: Report) -> tuple[str, ...]:
    """The whole run in words: days with failures, what it costs and draws; () where nothing more is known."""
    whole = report.outlook
    if whole is None:
        return ()
    words = [
        "" if whole.dollars is None else f"${whole.dollars:,.0f}",
        "" if whole.kilowatt_hours is None else f"{whole.kilowatt_hours:,.0f} kWh",
    ]
    told = " and ".join(word for word in words if word)
    sentences = [f"To its target it takes {told}."] if told else []
    if whole.goodput is not None and whole.checkpoint_seconds is not None:
        share = format_percent(whole.goodput)
        every = format_seconds(whole.checkpoint_seconds)
        written = format_seconds(whole.write_seconds)
        late = f", which is sooner than the {written} that one takes to write" if whole.checkpoint_hurries else ""
        sentences.append(f"Of the time {share} leads there, with a checkpoint every {every}{late}.")
    return tuple(sentences)


def _reserved(predicted: Report) -> tuple[str, ...]:
    """The peak that has to fit, on the fullest rank: what is allocated, as measured, and what is reserved beside it."""
    if not predicted.memory:
        return ()
    fullest = max(predicted.memory, key=lambda stage: stage.total)
    reserved = fullest.total - fullest.allocated
    parts = f"{format_bytes(fullest.allocated)} that the run allocates"
    if reserved:
        parts += f" and {format_bytes(reserved)} that the context and libraries reserve on a device"
    return (
        f"The predicted peak is {format_bytes(fullest.total)} of {format_bytes(fullest.capacity)}, on pipeline rank "
        f"{fullest.rank}{_chance(predicted)}: {parts}.",
    )


def _chance(predicted: Report) -> str:
    known = predicted.fit_probability
    return "" if known is None else f", and every rank fits with a chance of {format_percent(known)}"


def _rows_alone(report: Report, *, is_measured: bool) -> tuple[Row, ...]:
    lines: list[Line] = [report.step, *sorted(report.step.lines, key=lambda line: -line.seconds)]
    rows = []
    for line in lines:
        if not line.seconds and line.name != LineName.STEP:
            continue
        share = line.seconds / report.step_seconds if report.step_seconds else None
        part = f", {format_percent(share)} of the step" if share is not None and line.name != LineName.STEP else ""
        note = f" ({line.note})" if line.note else ""
        rows.append(
            Row(
                name=line.name,
                predicted=None if is_measured else line.seconds,
                measured=line.seconds if is_measured else None,
                share=share,
                words=f"{line.name}: {format_seconds(line.seconds)}{part}{note}",
            )
        )
    return tuple(rows)


def _memory(predicted: Report | None, measured: Report | None) -> tuple[MemoryRow, ...]:
    """Allocated bytes by pipeline rank, the largest gap in bytes first where both are known."""
    ours = {stage.rank: stage for stage in predicted.memory} if predicted else {}
    theirs = {stage.rank: stage for stage in measured.memory} if measured else {}
    rows = []
    for rank in sorted(ours.keys() | theirs.keys()):
        said = ours[rank].allocated if rank in ours else None
        took = theirs[rank].allocated if rank in theirs else None
        words = f"pipeline rank {rank}: {_bytes(took)} allocated, {_bytes(said)} predicted"
        if said and took is not None:
            words += f" ({took / said - 1.0:+.1%})".replace("%", " %")
        capacity = (ours.get(rank) or theirs[rank]).capacity
        rows.append(MemoryRow(rank=rank, predicted=said, measured=took, capacity=capacity, words=words))
    return tuple(sorted(rows, key=lambda row: -abs((row.measured or 0) - (row.predicted or 0)) if measured else 0))


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


def _seconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_seconds(seconds)


def _bytes(count: float | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def _right(cells: Sequence[str], widths: list[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
