"""Searching among ways of meeting: learners where they save time and the job allows them."""

from dataclasses import replace

import pytest

from meshwright.search import design
from meshwright.search.advice import advise
from meshwright.search.check import check, check_answer
from meshwright.search.rules import Scope
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError, NoPlanFits
from meshwright.spec.job import Constraints
from meshwright.spec.plan import AxisName
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import SynchronizeSpec, SyncKind
from tests.search import search_samples as samples
from tests.search.quorum_cases import REFUSED

LEARNERS = tuple(kind for kind in SyncKind if kind.has_learners)
FEWER = {"tensor": 1, "recompute": "none", "sequence_parallel": "off"}
MODEL = samples.model(vocab=4096)


def two_sites(bits=1e8):
    found = samples.cluster(samples.nodes(devices_per_node=2), samples.nodes(devices_per_node=2, site="b"))
    return replace(found, wide_area=replace(found.wide_area, bandwidth=bits / 8))


def asked(kinds=LEARNERS, *, fix=None, forbid=(), **fields):
    job = samples.job(constraints=Constraints(fix=FEWER | (fix or {}), forbid=forbid))
    return replace(job, synchronize=SynchronizeSpec(kinds=tuple(kinds), **fields))


def chosen(job, cluster=None):
    return design(MODEL, cluster or two_sites(), job, top=3)


def test_between_sites_learners_are_chosen_where_they_are_allowed():
    free, held = chosen(asked(precision=Precision.BF16, most_every=1000)), chosen(asked(()))
    plan = free.design.plan
    assert plan.learners > 1
    assert plan.axes[0].name in (AxisName.PIPELINE, AxisName.REPLICATE)
    assert plan.gradients.rounds.precision is Precision.BF16
    assert plan.gradients.rounds.every > 1
    assert check_answer(free.design) == ()
    assert check(free.design, scopes=frozenset({Scope.PLAN})) == ()
    assert held.design.plan.learners == 1
    assert free.report.step_seconds < 0.5 * held.report.step_seconds
    assert any("learners that meet as" in line and "numerics differ" in line for line in free.why)
    assert any("synchronize.kinds" in line for line in held.why)


def test_learners_are_spoken_of_where_stages_and_not_gradients_cross_between_sites():
    """The best plan that meets in every step sends no gradients there; the one with learners is divided otherwise."""
    held = chosen(asked((), fix={"pipeline": 2}))
    allowed = chosen(asked((SyncKind.EAGER,)))
    assert held.design.plan.learners == 1 < allowed.design.plan.learners
    (line,) = [line for line in held.why if "synchronize.kinds" in line]
    assert line.startswith("between 2 sites 2 learners meet as eager every ")
    forbidden = chosen(asked((), fix={"pipeline": 2, "sync": "every_step"}))
    assert not any("between 2 sites" in line for line in forbidden.why)


def test_where_nothing_is_slow_ranks_meet_in_every_step():
    near = samples.cluster(samples.nodes(devices_per_node=4))
    job = replace(asked(fix={"pipeline": 1}), batch_tokens=512 * 128)
    found = design(samples.model(vocab=64), near, job, top=1)
    assert found.design.plan.learners == 1 or found.report.share(LineName.GRADIENTS) == 0.0
    other = design(samples.model(vocab=64), near, replace(job, synchronize=SynchronizeSpec()), top=1)
    assert found.report.step_seconds <= other.report.step_seconds * 1.0001
    if found.design.plan.learners > 1:
        assert found.report.step_seconds < other.report.step_seconds * 0.9709


def test_where_the_least_rounds_of_a_kind_are_no_faster_ranks_meet_in_every_step():
    near = samples.cluster(samples.nodes(devices_per_node=4))
    job = replace(asked(fix={"pipeline": 1}), batch_tokens=512 * 128)
    found = design(MODEL, near, job, top=1)
    assert found.design.plan.learners == 1
    for kind in LEARNERS:
        fixed = design(
            MODEL, near, replace(asked((kind,), fix={"pipeline": 1, "sync": kind.value}), batch_tokens=512 * 128), top=1
        )
        assert fixed.design.plan.gradients.rounds.every >= kind.least_every
        assert fixed.ranked[0].expected_seconds > found.ranked[0].expected_seconds


@pytest.mark.slow
def test_what_is_fixed_and_forbidden_of_meeting_is_kept():
    fixed = chosen(asked((), fix={"sync": "local"}, every=7)).design.plan
    assert (fixed.gradients.kind, fixed.gradients.rounds.every) == (SyncKind.LOCAL, 7)
    fewer = {"pipeline": 1}
    forbidden = chosen(asked(fix=fewer, forbid=("sync=eager", "sync=streaming", "sync=co2"))).design.plan
    assert forbidden.gradients.kind in (SyncKind.LOCAL, SyncKind.DILOCO)
    assert chosen(asked(fix=fewer, forbid=("sync",))).design.plan.learners == 1
    with pytest.raises(ConfigError, match="'often' is not a sync"):
        chosen(asked(fix={"sync": "often"}))
    with pytest.raises(NoPlanFits):
        chosen(asked((), forbid=("sync=every_step",)))


def test_what_the_job_does_not_allow_is_refused_and_spoken_of():
    found = chosen(asked((SyncKind.LOCAL,), fix={"replicate": 2, "pipeline": 1}))
    made = replace(found.design, job=replace(found.design.job, synchronize=SynchronizeSpec()))
    (problem,) = check_answer(made)
    assert problem.why == "rule learners-are-asked"
    assert "--set 'job.synchronize.kinds=[\"local\"]'" in problem.fix
    held = chosen(asked((), fix={"replicate": 2, "pipeline": 1}))
    (line,) = advise(held.design, held.report)
    assert "less time" in line
    assert "has to be measured" in line
    assert advise(found.design, found.report) == ()
    assert advise(replace(held.design, job=made.job), held.report) == (line,)


def test_a_large_space_finds_what_a_small_one_does(monkeypatch):
    job = asked()
    whole = chosen(job)
    monkeypatch.setattr(
        "meshwright.search.explore.Explorer.__init__.__kwdefaults__", {"trainer": None, "exhaustive": 0}
    )
    climbed = chosen(job)
    assert climbed.report.step_seconds == pytest.approx(whole.report.step_seconds, rel=1e-3)


def test_grids_of_experts_stay_inside_learners():
    model = samples.model(layers=2, layer=samples.mixture_layer())
    found = design(model, two_sites(), asked(fix={"replicate": 2, "pipeline": 1, "expert": 2, "context": 1}), top=5)
    assert any(entry.plan.experts and entry.plan.learners > 1 for entry in found.ranked)
    for entry in found.ranked:
        assert check(replace(found.design, plan=entry.plan), scopes=frozenset({Scope.PLAN})) == ()


def test_a_quorum_is_of_plans_with_as_many_learners():
    quorum = asked((SyncKind.DILOCO,), quorum=2, grace_seconds=5.0, fix={"pipeline": 1}, precision=Precision.BF16)
    found = chosen(quorum)
    assert found.design.plan.learners > 2
    rounds = found.design.plan.gradients.rounds
    assert (rounds.quorum, rounds.grace_seconds) == (2, 5.0)
    assert check_answer(found.design) == ()
    assert check(found.design) == ()
    for entry in found.ranked:
        assert entry.plan.learners == 1 or entry.plan.learners > 2
    with pytest.raises(ConfigError, match="as streaming do not wait for each other"):
        chosen(asked((SyncKind.STREAMING,), quorum=1))


@pytest.mark.parametrize(("rule", "made", "says"), REFUSED)
def test_a_quorum_that_means_nothing_is_refused(rule, made, says):
    (problem,) = [problem for problem in check(made()) if f"rule {rule})" in str(problem)]
    assert says in str(problem)
    assert problem.fix
