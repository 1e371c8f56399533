"""Leaving out stages is weighed where the job allows it, keeps its share, and says what it is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import catalog, cost, search
from meshwright.report.explain import explain_files
from meshwright.report.run_files import RunFiles
from meshwright.schedule import planned
from meshwright.search.skip import skip
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Schedule
from meshwright.spec.report import LineName
from meshwright.spec.skip import SkipSpec
from tests.search import search_samples as samples
from tests.search.rule_cases import EVEN
from tests.search.rule_designs import on_paths

ASKED = (
    "constraints.fix.pipeline=8",
    "constraints.fix.microbatch=1",
    "batch_tokens=64Ki",
    "skip.share=0.33",
)


def test_stages_are_left_out_where_the_job_allows_it() -> None:
    job = catalog.load_job(None, sets=list(ASKED))
    found = search.design(catalog.load_model("llama-3.1-8b"), catalog.load_cluster("8xH100"), job, top=2)
    plan, (chosen, whole) = found.design.plan, found.ranked
    assert plan.schedule.paths
    assert not whole.plan.schedule.paths
    assert 0.25 < plan.skipped_share <= 0.331
    assert "31 % of the layers left out" in plan.describe()
    assert search.check(found.design) == ()
    assert chosen.step_seconds < 0.95 * whole.step_seconds
    assert any("every microbatch leaves out 2 of 8 stages" in note for note in found.report.notes)
    files = RunFiles(path=Path("plan.json"), name="plan", is_plan=True, design=found.design, predicted=found.report)
    assert any("what learns so is not the full model" in line for line in explain_files(files).sentences)
    told = r"microbatches that leave out .* as job.skip allows, in a pipeline of 8: .* faster .* has to be measured"
    assert re.search(told, found.why[-1])


def test_plans_that_leave_nothing_out_say_why() -> None:
    job = replace(samples.job(), skip=SkipSpec(share=0.3))
    made = samples.design(asked=job)
    found = skip([(made, cost.predict(made))], job)
    assert found.entry is None
    assert found.words.startswith("no microbatch leaves out stages: none of the best plans has four pipeline ranks")
    little = replace(samples.job(), skip=SkipSpec(share=0.01))
    made = samples.design(pipeline=4, shard=1, microbatch=4, asked=little)
    found = skip([(made, cost.predict(made))], little)
    assert found.entry is None
    assert "of more layers than job.skip.share" in found.words


def test_what_is_left_out_is_not_paid_for() -> None:
    """Each inner stage works for half of the microbatches, and the lines tell of the rank that works most."""
    skipping = on_paths(*EVEN)
    full = replace(skipping, plan=replace(skipping.plan, schedule=Schedule(microbatches=8)))
    half, whole = cost.predict(skipping), cost.predict(full)
    assert half.step_seconds < whole.step_seconds
    work = (LineName.FORWARD, LineName.BACKWARD)
    assert half.step_seconds * half.share(*work) < whole.step_seconds * whole.share(*work)
    layers = full.model.flops_per_token(128) - replace(full.model, layers=()).flops_per_token(128)
    assert half.model_flops == pytest.approx(whole.model_flops - layers * 2 / 6 * full.plan.batch_tokens)
    assert sum(line.seconds for line in half.step.lines) == pytest.approx(half.step_seconds)
    assert planned.passes(skipping.plan.schedule, 1) == 4


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("skip.share=0.5",), "skip.share: 0.5 is not from 0 to a third"),
        (("skip.share=-0.1",), "skip.share: -0.1 is not from 0 to a third"),
        (("skip.swap=neighbours",), "skip.swap: neighbours changes places of stages and nothing is left out"),
    ],
)
def test_a_job_that_asks_for_what_is_not_known_is_refused(sets: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        catalog.load_job(None, sets=list(sets))
