"""Plans in the ranked table: what is told of their axes, and of precisions that differ."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from meshwright import cost
from meshwright.report.rows import layout_words
from meshwright.report.settings import settings
from meshwright.report.terminal import ranked
from meshwright.search.candidate import candidate
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Plan
from tests.report import synthetic

DESIGN = synthetic.design(pipeline=2, shard=2)


def precise(plan: Plan, precision: Precision) -> Plan:
    stages = tuple(
        replace(stage, groups=tuple(replace(group, precision=precision) for group in stage.groups))
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def shown(*plans: Plan, width: int) -> str:
    report = cost.predict(DESIGN)
    console = Console(width=width, record=True, file=StringIO())
    console.print(ranked([candidate(replace(DESIGN, plan=plan), report) for plan in plans], width=width))
    return console.export_text()


def test_precisions_are_told_where_they_differ() -> None:
    bf16, fp8 = (precise(DESIGN.plan, kind) for kind in (Precision.BF16, Precision.FP8))
    for width in (80, 160):
        both, alike = shown(bf16, fp8, width=width), shown(fp8, fp8, width=width)
        assert "bf16" in both
        assert "fp8" in both
        assert "fp8" not in alike


def test_axes_are_told_in_another_order_than_the_usual_one() -> None:
    turned = replace(DESIGN.plan, axes=tuple(reversed(DESIGN.plan.axes)))
    assert "outwards" not in layout_words(DESIGN.plan)
    words = layout_words(turned)
    assert words.endswith(" outwards")
    assert words.index("pipeline") < words.index("shard")


def test_settings_name_the_devices_of_ranks_that_are_placed() -> None:
    assert dict(settings(DESIGN))["devices of the ranks"] == "as listed"
    placed = replace(DESIGN, plan=replace(DESIGN.plan, placement=(2, 3, 0, 1)))
    assert dict(settings(placed))["devices of the ranks"] == "2 to 3, 0 to 1"
