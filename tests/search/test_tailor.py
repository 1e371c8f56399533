"""A schedule made to measure for the best plan is taken where it pays, and told of where it does not."""

from __future__ import annotations

import re

import pytest

from meshwright import catalog, cost, search
from meshwright.export import holder
from meshwright.search.refine import entry_value
from meshwright.search.tailor import WORTH, tailor
from meshwright.spec.errors import ConfigError
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
    found = decided("llama-2-7b", "constraints.fix.pipeline=2", "batch_tokens=256Ki")
    assert found.design.plan.schedule.kind is not ScheduleKind.TABLE
    assert re.fullmatch(r"no table made for these stages instead of \S+ pays: the best is .*%", found.why[-1])


@pytest.mark.parametrize(
    ("microbatches", "fields", "why"),
    [
        (2, {"pipeline": 1, "shard": 4, "microbatch": 4}, "the best plan has no pipeline"),
        (1, {"microbatch": 16}, "what could be made is refused by rules, or does not fit"),
        (20_000, {"microbatch": 1}, "120,000 passes in halves are too many to try orders of"),
    ],
)
def test_plans_that_have_no_table_say_why(microbatches: int, fields: dict[str, int], why: str) -> None:
    made = samples.design(schedule=Schedule(kind=ScheduleKind.GPIPE, microbatches=microbatches), **fields)
    found = tailor((made, cost.predict(made)), made.job.objective)
    assert found.entry is None
    assert found.words == f"no table was made: {why}"


def test_other_trainers_have_no_words_for_tables() -> None:
    asked = catalog.load_model("tiny"), catalog.load_cluster("2xH100"), catalog.load_job(None)
    with pytest.raises(ConfigError, match="synthesize: torchtitan has no words for tables"):
        search.design(*asked, trainer=holder("torchtitan", where="--for"), synthesize=True)


def test_a_schedule_that_the_job_fixes_stays() -> None:
    found = decided("llama-3.2-1b", "constraints.fix.pipeline=4", "batch_tokens=64Ki", "constraints.fix.schedule=1f1b")
    assert found.design.plan.schedule.kind is ScheduleKind.ONE_F_ONE_B
