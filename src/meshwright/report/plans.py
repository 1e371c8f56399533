"""The plans that were considered, as tables: those ranked, those refused by rule, and why the winner wins."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.report.explain import UNKNOWN
from meshwright.report.figure import Table
from meshwright.search import Decision
from meshwright.search.candidate import Candidate
from meshwright.spec.group_words import sharding_words
from meshwright.spec.plan import BlockGroup, Design, Recompute, Sharding
from meshwright.spec.units import format_bytes, format_count, format_percent, format_seconds

_MOST_PLANS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansView:
    """`chosen` is the row of the plan that runs, -1 when it is not among those shown."""

    summary: str
    ranked: Table
    chosen: int
    rejected: Table | None
    why: tuple[str, ...]


def plans_view(decision: Decision | None, *, chosen: str) -> PlansView | None:
    """The decision as a page shows it; None without one. `chosen` is the digest of the plan."""
    if decision is None:
        return None
    candidates = decision.ranked[:_MOST_PLANS]
    rejected = tuple((entry.rule, entry.example, f"{entry.count:,}") for entry in decision.rejected if entry.count)
    digests = [entry.plan.digest() for entry in candidates]
    return PlansView(
        summary=_summary(decision),
        ranked=Table(
            headers=("", "plan", "step", "tokens/s", "MFU", "memory", "fits", "bubble", "communication"),
            rows=tuple(_row(index, entry) for index, entry in enumerate(candidates)),
            words=2,
        ),
        chosen=digests.index(chosen) if chosen in digests else -1,
        rejected=Table(headers=("rule", "for example", "combinations"), rows=rejected, words=2) if rejected else None,
        why=decision.why,
    )


def layout_table(design: Design) -> Table:
    """Stages of the plan and what happens to their blocks; stages in a row that are alike share a line."""
    runs: list[tuple[tuple[str, ...], list[int]]] = []
    for index, stage in enumerate(design.plan.stages):
        for group in stage.groups:
            blocks = design.model.blocks[group.start : group.stop]
            parameters = format_count(sum(block.parameters for block in blocks))
            contents = (str(len(blocks)), parameters, _treatment(group))
            if runs and runs[-1][0] == contents:
                runs[-1][1].append(index)
            else:
                runs.append((contents, [index]))
    rows = tuple((_span_of(stages), *contents) for contents, stages in runs)
    return Table(headers=("stage", "blocks each", "parameters each", "layout"), rows=rows, words=4)


def _span_of(stages: list[int]) -> str:
    return str(stages[0]) if stages[0] == stages[-1] else f"{stages[0]} to {stages[-1]}"


def _summary(decision: Decision) -> str:
    considered, all_priced = decision.considered, decision.priced == decision.considered
    parts = [f"{considered:,} legal plans were {'priced' if all_priced else 'searched'}" if considered else ""]
    parts.append("" if all_priced else f"{decision.priced:,} that could be best were priced")
    parts += [f"{decision.fitting:,} fit in memory", f"in {format_seconds(decision.seconds)}"]
    return ", ".join(part for part in parts if part)


def _row(index: int, entry: Candidate) -> tuple[str, ...]:
    return (
        str(index + 1),
        entry.plan.describe(),
        format_seconds(entry.step_seconds),
        f"{entry.tokens_per_second:,.0f}",
        UNKNOWN if entry.mfu is None else format_percent(entry.mfu),
        format_bytes(entry.peak_bytes),
        UNKNOWN if entry.fit_probability is None else format_percent(entry.fit_probability),
        format_percent(entry.bubble_share),
        format_percent(entry.communication_share),
    )


def _treatment(group: BlockGroup) -> str:
    parts = [f"tensor {group.tensor}" if group.tensor > 1 else ""]
    parts.append("sequence parallel" if group.sequence_parallel else "")
    parts.append(sharding_words(group) if group.sharding is not Sharding.NONE else "")
    parts.append(f"recompute {group.recompute.value}" if group.recompute is not Recompute.NONE else "")
    parts.append(group.precision.value)
    return ", ".join(part for part in parts if part)
