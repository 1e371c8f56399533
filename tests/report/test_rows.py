"""Rows of plans say all that makes them differ, by what they are ordered, and what of the job nobody asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from meshwright import catalog, search
from meshwright.cli import main
from meshwright.report import terminal
from meshwright.report.rows import plan_names, row_words, setting_words
from meshwright.report.scatter import scatter
from meshwright.search import Decision
from meshwright.spec.cluster import Precision
from meshwright.spec.exchange import Exchange, ExchangeKind
from meshwright.spec.plan import AxisName, Plan, Recompute
from meshwright.spec.synchronize import GradientSync
from meshwright.spec.units import format_seconds, format_tokens, parse_count


@pytest.fixture(scope="module")
def decision() -> Decision:
    """Plans of long sequences, of which many differ in the exchange of context ranks alone."""
    spec, machines = catalog.load_model("llama-3.1-8b"), catalog.load_cluster("16xH100")
    sets = ("sequence_length=32Ki", "constraints.fix.pipeline=1", "constraints.fix.tensor=1")
    return search.design(spec, machines, catalog.load_job(None, sets=sets), top=20)


def shown(value: Decision, *, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as caught:
        console.print(terminal.decision(value))
    return caught.get()


def variants(plan: Plan) -> list[Plan]:
    """Plans that differ from `plan` in one thing each, none of which was in a row before."""
    first = plan.stages[0]
    mixed = tuple(
        replace(first.groups[0], start=start, stop=stop, recompute=kind)
        for start, stop, kind in ((0, 5, Recompute.FULL), (5, first.stop, Recompute.NONE))
    )
    other = (replace(mixed[0], stop=6), replace(mixed[1], start=6))
    swapped = (
        replace(mixed[0], recompute=Recompute.NONE, stop=first.stop - 5),
        replace(mixed[0], start=first.stop - 5, stop=first.stop),
    )
    return [
        plan,
        *(replace(plan, exchange=Exchange(kind=kind, inner=inner)) for kind in ExchangeKind for inner in (1, 2)),
        *(replace(plan, stages=(replace(first, groups=groups),)) for groups in (mixed, other, swapped)),
        replace(plan, gradients=GradientSync(precision=Precision.BF16)),
        replace(plan, axes=tuple(reversed(plan.axes))),
        replace(plan, placement=tuple(reversed(range(plan.world_size)))),
        replace(plan, placement=(1, 0, *range(2, plan.world_size))),
    ]


@pytest.mark.slow
def test_no_two_rows_of_different_plans_are_alike(decision: Decision) -> None:
    plan = next(
        entry.plan
        for entry in decision.ranked
        if (entry.plan.pipeline == 1 and entry.plan.context > 2) or entry.plan.context > 1
    )
    plans = {each.digest(): each for each in (*variants(plan), *(entry.plan for entry in decision.ranked))}
    for texts in (row_words(list(plans.values())), plan_names(list(plans.values()))):
        assert len(set(texts)) == len(plans)


def test_a_row_names_the_exchange_and_how_many_blocks_are_computed_again(decision: Decision) -> None:
    plan = next(entry.plan for entry in decision.ranked if entry.plan.context > 1)
    ring = replace(plan, exchange=Exchange())
    assert "ring" in setting_words(ring)
    assert "gather" in setting_words(replace(plan, exchange=Exchange(kind=ExchangeKind.GATHER)))
    assert "full recompute in 5 blocks" in setting_words(variants(ring)[5])
    alone = replace(
        plan, axes=tuple(replace(axis, size=1) if axis.name is AxisName.CONTEXT else axis for axis in plan.axes)
    )
    assert "ring" not in setting_words(replace(alone, exchange=Exchange()))


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_order_of_the_rows_is_said_and_seen(decision: Decision, width: int) -> None:
    text = shown(decision, width=width)
    assert "Ranked by the step that 19 of 20 stay under, over the chance that it fits." in " ".join(text.split())
    assert "ranked by" in text
    found = [entry.expected_seconds for entry in decision.ranked]
    assert None not in found
    assert found == sorted(found, key=lambda value: value or 0.0)
    for entry in decision.ranked[:3]:
        assert entry.expected_seconds is not None
        assert entry.expected_seconds >= entry.step_seconds * entry.error_band[1]
        assert format_seconds(entry.expected_seconds) in text


def test_what_plans_are_priced_as_is_said_and_why(decision: Decision) -> None:
    assert "priced as torch, this runtime" in shown(decision, width=120)
    there = replace(decision, report=replace(decision.report, software="xla"))
    assert "priced as xla, which runs on these devices" in shown(there, width=120)
    job = replace(decision.design.job, software="xla")
    named = replace(there, design=replace(decision.design, job=job))
    assert "priced as xla, the software that the job names" in shown(named, width=120)


@pytest.mark.usefixtures("searched_once")
def test_what_was_asked_and_what_is_a_default_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "-m",
        "llama-3.1-8b",
        "-c",
        "8xH100",
        "--set",
        "batch_tokens=512Ki",
        "--set",
        "constraints.fix.tp=2",
    ]
    assert main(words) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "asked: batch_tokens 512Ki, constraints.fix.tensor 2; defaults: sequence_length 2,048, total_tokens 1T" in told
    )
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["asked"]["batch_tokens"] == "512Ki"
    assert document["defaults"] == {
        "sequence_length": "2,048",
        "total_tokens": "1T",
        "precision": "auto",
        "objective": "time",
    }
    assert document["ordered_by"].startswith("the step that 19 of 20 stay under")


@pytest.mark.parametrize("count", [1, 2048, 4 * 2**20, 10**12, 300 * 10**9, 123_456_789, 15_000_000])
def test_counts_of_tokens_are_read_back(count: int) -> None:
    assert parse_count(format_tokens(count)) == count


@pytest.mark.parametrize("spread", [1e-4, 1e-3, 0.02, 0.5])
def test_ticks_of_memory_are_round_and_no_two_are_alike(decision: Decision, spread: float) -> None:
    entries = [
        replace(entry, peak_bytes=43.9 * 2**30 * (1.0 + spread * index), capacity_bytes=200 * 2**30)
        for index, entry in enumerate(decision.ranked[:4])
    ]
    axis = scatter(entries, chosen=0).body.split('class="yaxis"')[1].split("</div>")[0]
    labels = [part.split("<")[0] for part in axis.split('">')[2:]]
    assert len(labels) >= 2
    assert len(set(labels)) == len(labels)
    steps = {round(float(after.split()[0]) - float(before.split()[0]), 9) for before, after in pairwise(labels)}
    assert len(steps) == 1
    assert f"{steps.pop():e}"[:3] in ("1.0", "2.0", "2.5", "5.0")


def test_a_shorter_step_that_is_ranked_later_is_pointed_out(decision: Decision) -> None:
    first, *rest = decision.ranked[:3]
    shorter = replace(rest[-1], step_seconds=0.9 * first.step_seconds)
    told = replace(decision, ranked=(first, rest[0], shorter))
    assert "Plan 3 has the shortest step of these" in " ".join(shown(told, width=120).split())
    alone = replace(decision, ranked=(first,))
    assert "has the shortest step" not in shown(alone, width=120)
