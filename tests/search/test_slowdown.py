"""Where memory or cost is least, plans are held to the time of the fastest."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from meshwright import catalog, search
from meshwright.search import Question, why_not
from meshwright.search.candidate import expected_seconds
from meshwright.search.decide import best, explored, legal_space
from meshwright.search.explore import Explorer
from meshwright.search.why_not import Verdict
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Constraints, JobSpec, Objective
from tests.search import search_samples as samples
from tests.support.sampled import sampled

MODEL = samples.model(layers=4)
BOX = samples.cluster(samples.nodes(devices_per_node=4))
SLOW = samples.device(name="slow", speed=0.1)
UNLIKE = samples.cluster(samples.nodes(devices_per_node=2), samples.nodes(devices_per_node=2, of=SLOW))
HELD = (Objective.MEMORY, Objective.COST)


def asked(objective: Objective, *, slowdown: float = 2.0) -> JobSpec:
    constraints = Constraints(devices="any", slowdown=slowdown)
    return replace(samples.job(sequences=8, constraints=constraints), objective=objective)


@pytest.mark.parametrize("cluster", [BOX, pytest.param(UNLIKE, marks=pytest.mark.slow)], ids=["alike", "unlike"])
@pytest.mark.parametrize("objective", sampled(HELD, quick=1))
def test_the_best_is_the_least_of_those_that_are_fast_enough(objective: Objective, cluster: ClusterSpec) -> None:
    fastest = best(MODEL, cluster, asked(Objective.TIME))
    least = expected_seconds(fastest.design, fastest.report)
    found, values = {}, []
    for slowdown in (1.0, 1.3, 2.0, 5.0, 1e9):
        made = best(MODEL, cluster, asked(objective, slowdown=slowdown))
        assert expected_seconds(made.design, made.report) <= slowdown * least * (1.0 + 1e-9)
        found[slowdown] = made
        cost = expected_seconds(made.design, made.report) * made.design.plan.world_size
        values.append(made.report.peak_bytes if objective is Objective.MEMORY else cost)
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


@pytest.mark.parametrize("cluster", [BOX, pytest.param(UNLIKE, marks=pytest.mark.slow)], ids=["alike", "unlike"])
@pytest.mark.parametrize("objective", sampled(HELD, quick=1))
def test_what_is_left_out_early_is_slower_than_is_asked(objective: Objective, cluster: ClusterSpec) -> None:
    job = asked(objective)
    space, question = legal_space(MODEL, cluster, job), {"model": MODEL, "cluster": cluster, "job": job}
    every = explored(MODEL, cluster, replace(job, objective=Objective.TIME))
    least = float(np.min(every.scores()[every.prices.fits]))
    for times in (1.1, 2.0, 10.0):
        whole, early = (Explorer(space, **question, within=times * least, exhaustive=most) for most in (space.count, 0))
        for found in (whole, early):
            found.best(20)
        scores = [np.sort(found.scores()[found.prices.fits]) for found in (whole, early)]
        known = 20 if objective is Objective.MEMORY else 1  # of others, that compute more again, the best alone
        known = min(known, np.count_nonzero(np.isfinite(scores[0])))
        assert known > 0
        assert np.allclose(scores[0][:known], scores[1][:known])
        assert early.priced < whole.priced


@pytest.mark.slow
def test_why_says_what_the_fastest_takes_and_what_more_time_would_save() -> None:
    decision = search.design(MODEL, UNLIKE, asked(Objective.MEMORY, slowdown=1.2))
    (fastest,) = (line for line in decision.why if line.startswith("the fastest plan takes"))
    made = best(MODEL, UNLIKE, asked(Objective.TIME))
    assert made.design.plan.describe() in fastest
    (more,) = (line for line in decision.why if "less memory would take" in line)
    assert "constraints.slowdown is 1.2" in more
    named = int(re.search(r"with (\d+) that plan is chosen", more)[1])
    lighter = best(MODEL, UNLIKE, asked(Objective.MEMORY, slowdown=named))
    assert lighter.design.plan.describe() in more
    assert lighter.report.peak_bytes < decision.report.peak_bytes


def test_nothing_is_held_to_the_fastest_where_time_is_what_is_minimised() -> None:
    one, other = (best(MODEL, UNLIKE, asked(Objective.TIME, slowdown=times)) for times in (1.0, 9.0))
    assert one.design.plan == other.design.plan


def test_a_step_cannot_be_shorter_than_the_fastest() -> None:
    for value in ("0.5", "-1", "inf", "nan"):
        with pytest.raises(ConfigError, match=r"constraints\.slowdown"):
            catalog.load_job(None, sets=[f"constraints.slowdown={value}"])
    assert catalog.load_job(None, sets=["constraints.slowdown=3.5"]).constraints.slowdown == 3.5


@pytest.mark.slow
def test_settings_are_held_to_the_fastest_of_all() -> None:
    asking = Question(model=MODEL, cluster=UNLIKE, job=asked(Objective.MEMORY, slowdown=1.2))
    decision = search.design(asking.model, asking.cluster, asking.job)
    least = best(MODEL, UNLIKE, asked(Objective.MEMORY, slowdown=1e9)).design.plan
    settings = {"devices": least.world_size, "pipeline": least.pipeline, "microbatch": least.microbatch}
    answer = why_not(asking, decision, settings)
    assert answer.sentences[0].startswith("No plan with them takes less than 1.2 times the fastest plan's")
    assert answer.verdict is Verdict.BETTER
    assert answer.report is not None
    assert answer.report.step_seconds > 1.2 * decision.report.step_seconds
