"""Plans in the ranked table: what is told of their axes, and of precisions that differ."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from meshwright import cost
from meshwright.report import terminal, terminal_why
from meshwright.report.rows import layout_words
from meshwright.report.settings import settings
from meshwright.report.terminal import ranked
from meshwright.search.candidate import Decision, candidate
from meshwright.search.headroom import Headroom, Limit
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import Problem
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
    assert "inwards" not in layout_words(DESIGN.plan)
    words = layout_words(turned)
    assert words.endswith(" inwards")
    assert words == "shard 2 x pipeline 2, from the outermost axis inwards"


def test_settings_name_the_devices_of_ranks_that_are_placed() -> None:
    assert dict(settings(DESIGN))["devices of the ranks"] == "as listed"
    placed = replace(DESIGN, plan=replace(DESIGN.plan, placement=(2, 3, 0, 1)))
    assert dict(settings(placed))["devices of the ranks"] == "2 to 3, 0 to 1"


def page(decision: Decision, *, width: int = 160) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(terminal.decision(decision))
    return console.export_text()


def decided(*plans: Plan) -> Decision:
    report = cost.predict(DESIGN)
    found = tuple(candidate(replace(DESIGN, plan=plan), report) for plan in plans or (DESIGN.plan,))
    why = ("it is the fastest",)
    return Decision(
        design=DESIGN,
        report=report,
        ranked=found,
        rejected=(),
        why=why,
        considered=2,
        priced=2,
        fitting=2,
        seconds=1.0,
        ordered_by="the step",
    )


def test_that_a_plan_is_predicted_only_stands_above_its_figures() -> None:
    refused = Problem(what="nvfp4 can be predicted and not trained yet", where="plan.stages[0].precision")
    text = page(replace(decided(), predicts_only=(refused,)))
    assert text.index("nvfp4 can be predicted and not trained yet") < text.index("tokens/s")
    assert "predicts only" not in page(decided())


def test_a_plan_that_is_unlikely_to_fit_says_so_in_the_headline() -> None:
    unsure, sure = (replace(decided(), report=replace(decided().report, fit_probability=p)) for p in (0.588, 0.95))
    assert page(unsure).index("it fits in memory with 58.8 %") < page(unsure).index("tokens/s")
    assert "it fits in memory with" not in page(sure)


def test_one_device_is_one_device() -> None:
    groups = tuple(replace(group, num_nodes=1, devices_per_node=1) for group in DESIGN.cluster.groups)
    alone = replace(decided(), design=replace(DESIGN, cluster=replace(DESIGN.cluster, groups=groups)))
    assert " 1 device, " in page(alone)


def test_plans_that_all_show_the_same_figures_are_said_to() -> None:
    turned = replace(DESIGN.plan, axes=tuple(reversed(DESIGN.plan.axes)))
    assert "All 2 show the same figures" in page(decided(DESIGN.plan, turned))
    first, other = decided(DESIGN.plan, turned).ranked
    slower = replace(other, step_seconds=2.0 * other.step_seconds)
    assert "the same figures" not in page(replace(decided(), ranked=(first, slower)))


def test_what_lifting_a_limit_gives_is_told_in_times_where_it_is_manifold() -> None:
    half = Limit(
        name="memory",
        words="if memory were no limit",
        gain=0.5,
        plan=DESIGN.plan,
        step_seconds=1.0,
        tokens_per_second=1.0,
        changed={},
    )
    limits = (replace(half, gain=4.91), half)
    console = Console(width=160, record=True, file=StringIO())
    console.print(terminal_why.headroom(Headroom(limits=limits, sentence="It is memory.")))
    text = console.export_text()
    assert "+50.0 %" in text
    assert "5.91 times" in text
