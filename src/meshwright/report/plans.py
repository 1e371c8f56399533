"""The plans that were considered, as tables: those ranked, those refused by rule, and why the winner wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.report.explain import UNKNOWN
from meshwright.report.figure import Table
from meshwright.spec import codec
from meshwright.spec.plan import BlockGroup, Design, Plan, Recompute, Sharding
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


def plans_view(decision: Mapping[str, Any] | None, *, chosen: str) -> PlansView | None:
    """The decision as a page shows it, from its JSON; None without one. `chosen` is the digest of the plan."""
    if not decision:
        return None
    candidates = list(decision.get("ranked") or ())[:_MOST_PLANS]
    plans = [
        codec.decode(Plan, entry["plan"], f"decision.ranked[{index}].plan") for index, entry in enumerate(candidates)
    ]
    rejected = tuple(
        (str(entry["rule"]), str(entry.get("example", "")), f"{entry.get('count', 0):,}")
        for entry in decision.get("rejected") or ()
        if entry.get("count")
    )
    digests = [plan.digest() for plan in plans]
    return PlansView(
        summary=_summary(decision),
        ranked=Table(
            headers=("", "plan", "step", "tokens/s", "MFU", "memory", "fits", "bubble", "communication"),
            rows=tuple(
                _row(index, plan, entry) for index, (plan, entry) in enumerate(zip(plans, candidates, strict=True))
            ),
            words=2,
        ),
        chosen=digests.index(chosen) if chosen in digests else -1,
        rejected=Table(headers=("rule", "for example", "combinations"), rows=rejected, words=2) if rejected else None,
        why=tuple(str(line) for line in decision.get("why") or ()),
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


def _summary(decision: Mapping[str, Any]) -> str:
    considered, priced, fitting = (decision.get(name) for name in ("considered", "priced", "fitting"))
    all_priced = not isinstance(priced, int) or priced == considered
    parts = [f"{considered:,} legal plans were {'priced' if all_priced else 'searched'}" if considered else ""]
    parts.append("" if all_priced else f"{priced:,} that could be best were priced")
    parts.append(f"{fitting:,} fit in memory" if isinstance(fitting, int) else "")
    seconds = decision.get("seconds")
    parts.append(f"in {format_seconds(seconds)}" if isinstance(seconds, (int, float)) else "")
    return ", ".join(part for part in parts if part)


def _row(index: int, plan: Plan, entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(index + 1),
        plan.describe(),
        _shown(entry.get("step_seconds"), format_seconds),
        _shown(entry.get("tokens_per_second"), lambda value: f"{value:,.0f}"),
        _shown(entry.get("mfu"), format_percent),
        _shown(entry.get("peak_bytes"), format_bytes),
        _shown(entry.get("fit_probability"), format_percent),
        _shown(entry.get("bubble_share"), format_percent),
        _shown(entry.get("communication_share"), format_percent),
    )


def _shown(value: Any, show: Any) -> str:
    return show(value) if isinstance(value, (int, float)) else UNKNOWN


def _treatment(group: BlockGroup) -> str:
    parts = [f"tensor {group.tensor}" if group.tensor > 1 else ""]
    parts.append("sequence parallel" if group.sequence_parallel else "")
    parts.append(group.sharding.value if group.sharding is not Sharding.NONE else "")
    parts.append(f"recompute {group.recompute.value}" if group.recompute is not Recompute.NONE else "")
    parts.append(group.precision.value)
    return ", ".join(part for part in parts if part)
