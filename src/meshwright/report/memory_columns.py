"""Memory of every pipeline rank as columns of its parts against what the device may use, for any number of ranks."""

from __future__ import annotations

from meshwright.report import svg
from meshwright.report.bars import memory_figure, memory_parts
from meshwright.report.figure import Figure, Table, colour
from meshwright.spec.report import Report, StageMemory
from meshwright.spec.units import format_bytes

_MOST_ROWS = 8
_HEIGHT = 190
_WIDTH = 0.86


def memory_of_ranks(report: Report) -> Figure | None:
    """Bytes by part: a bar a rank where ranks are few, else a column a rank; None where nothing is known."""
    if len(report.memory) <= _MOST_ROWS:
        return memory_figure(report, None)
    stages = sorted(report.memory, key=lambda stage: stage.rank)
    parts = memory_parts(stages)
    capacity = max(stage.capacity for stage in stages)
    scale = svg.Scale(low=0.0, high=1.04 * max(capacity, *(stage.total for stage in stages)))
    columns = [_stripes(stages, part, scale, below=parts[:index]) for index, part in enumerate(parts)]
    limit = svg.stripes([[0.0, 1.0]], top=_HEIGHT * (1.0 - scale(capacity)) - 1, height=2, kind="capacity")
    hovers = [_hover(stage, parts, index / len(stages), 1.0 / len(stages)) for index, stage in enumerate(stages)]
    said = f"memory of {len(stages)} pipeline ranks by part, of {format_bytes(capacity)} each"
    picture = svg.drawing(*columns, limit, *hovers, height=_HEIGHT, label=said)
    ends = (
        f'<div class="ends" aria-hidden="true"><span>rank {stages[0].rank}</span><span>{stages[-1].rank}</span></div>'
    )
    return Figure(
        title="Memory at the peak",
        caption=(
            f"A column for the heaviest device of each of {len(stages)} pipeline ranks, in order, predicted. "
            f"The line is the {format_bytes(capacity)} that a device may use."
        ),
        body=f'<div class="columns">{picture}{ends}</div>',
        table=_table(stages, parts),
        legend=(*((colour(part), part) for part in parts), ("capacity", "capacity")),
    )


def _stripes(stages: list[StageMemory], part: str, scale: svg.Scale, *, below: tuple[str, ...]) -> str:
    """One shape for one part of all ranks, above the parts `below`, in a box of 1000 by 1000."""
    pieces = []
    for index, stage in enumerate(stages):
        count = stage.parts.get(part, 0.0)
        if count > 0.0:
            base = sum(stage.parts.get(name, 0.0) for name in below)
            top, height = 1000 * (1.0 - scale(base + count)), max(1000 * scale(count), 1.0)
            left, width = 1000 * (index + (1 - _WIDTH) / 2) / len(stages), 1000 * _WIDTH / len(stages)
            pieces.append(f"M{left:.1f} {top:.0f}h{width:.1f}v{height:.0f}h-{width:.1f}z")
    shape = svg.element("path", d="".join(pieces), class_=colour(part))
    return svg.element("svg", shape, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%", height=_HEIGHT)


def _hover(stage: StageMemory, parts: tuple[str, ...], left: float, width: float) -> str:
    each = ", ".join(f"{part} {format_bytes(stage.parts[part])}" for part in parts if stage.parts.get(part, 0.0) > 0.0)
    said = f"rank {stage.rank}: {format_bytes(stage.total)} of {format_bytes(stage.capacity)}: {each}"
    return svg.bar(start=left, width=width, top=0, height=_HEIGHT, kind="hover", title=said)


def _table(stages: list[StageMemory], parts: tuple[str, ...]) -> Table:
    rows = tuple(
        (
            str(stage.rank),
            *(format_bytes(stage.parts.get(part, 0.0)) for part in parts),
            format_bytes(stage.total),
            format_bytes(stage.capacity),
        )
        for stage in stages
    )
    return Table(headers=("rank", *parts, "total", "capacity"), rows=rows)
