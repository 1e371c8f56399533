"""A schedule made to measure for the best plan is taken where it pays, and told of where it does not."""

from __future__ import annotations

import re

import pytest

from meshwright import catalog, cost, search
from meshwright.search.refine import entry_value
from meshwright.search.tailor import WORTH, tailor
from meshwright.spec.plan import Schedule, ScheduleKind
from meshwright.spec.report import LineName
from tests.search import search_samples as samples


def decided(model: str, *sets: str, synthesize: bool = True) -> search.Decision:
    job = catalog.load_job(None, sets=list(sets))
    return search.design(catalog.load_model(model), catalog.load_cluster("8xH100"), job, top=1, synthesize=synthesize)


def test_uneven_stages_have_a_table_of_their_own_and_the_plan_says_what_it_gains() -> None:
    """The head of a vocabulary of 128 K is worth four layers, and three stages of sixteen layers wait for it."""
    asked = "constraints.fix.pipeline=4", "batch_tokens=64Ki"
    found, classic = decided("llama-3.2-1b", *asked), decided("llama-3.2-1b", *asked, synthesize=False)
    plan, objective = found.design.plan, found.design.job.objective
    assert plan.schedule.kind is ScheduleKind.TABLE
    assert classic.design.plan.schedule.kind is not ScheduleKind.TABLE
    assert search.check(found.design) == ()
    before, after = ((each.design, each.report) for each in (classic, found))
    assert entry_value(after, objective) < (1.0 - WORTH) * entry_value(before, objective)
    assert found.report.share(LineName.BUBBLE) < classic.report.share(LineName.BUBBLE)
    assert found.ranked[0].plan == plan
    pattern = (
        r"a table made for these stages instead of (\S+): [\d.]+ % faster, bubble .* shorter by more than [\d.]+ %"
    )
    told = re.fullmatch(pattern, found.why[-1])
    assert told is not None
    assert told[1] == classic.design.plan.schedule.kind.value
    assert tailor(before, objective) == tailor(before, objective)


def test_a_schedule_that_no_table_beats_stays() -> None:
    found = decided("gpt3-1.3b", "constraints.fix.pipeline=8", "batch_tokens=32Ki")
    assert found.design.plan.schedule.kind is not ScheduleKind.TABLE
    assert re.fullmatch(r"no table made for these stages instead of \S+ pays: the best is .*%", found.why[-1])


@pytest.mark.parametrize("fields", [{"pipeline": 1, "shard": 4, "microbatch": 4}, {"microbatch": 16}])
def test_plans_without_a_pipeline_or_of_one_microbatch_have_no_table(fields: dict[str, int]) -> None:
    microbatches = 2 if "pipeline" in fields else 1
    made = samples.design(schedule=Schedule(kind=ScheduleKind.GPIPE, microbatches=microbatches), **fields)
    assert tailor((made, cost.predict(made)), made.job.objective) is None


def test_a_schedule_that_the_job_fixes_stays() -> None:
    found = decided("llama-3.2-1b", "constraints.fix.pipeline=4", "batch_tokens=64Ki", "constraints.fix.schedule=1f1b")
    assert found.design.plan.schedule.kind is ScheduleKind.ONE_F_ONE_B
