"""Quorums of learners of unlike speed: told of where the job does not allow one, and chosen where it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost import predict
from meshwright.search import design
from meshwright.search.check import check, check_answer
from meshwright.search.quorum import advise_quorum, offers, with_quorum
from meshwright.spec.job import Constraints
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import SynchronizeSpec, SyncKind
from tests.cost.test_quorum import uneven
from tests.search import search_samples as samples


def held(*, slower: float = 3.0) -> Design:
    """Four learners that wait for each other, of which one is so much slower."""
    return uneven(slower=slower, quorum=0, grace=0.0)


def test_a_quorum_that_would_save_time_is_told_with_what_it_leaves_out() -> None:
    made = held()
    report = predict(made)
    (line,) = advise_quorum(made, report)
    assert "learners end, with" in line
    assert "of the sequences out" in line
    assert "has to be measured" in line
    share = float(line.rsplit("most_left_out=", 1)[1])
    allowed = replace(made.job, synchronize=SynchronizeSpec(kinds=(SyncKind.DILOCO,), most_left_out=share))
    chosen = with_quorum([(made, report)], allowed)
    assert chosen.entry is not None, "what is told can be had by what is told"
    assert line.startswith(chosen.words.split("; job.synchronize", 1)[0])


def test_what_is_saved_is_of_as_many_tokens() -> None:
    """Each offer is predicted as any plan: shorter steps count for the sequences that they read."""
    made = held()
    report = predict(made)
    found = list(offers(made, report))
    assert {one.entry[0].plan.gradients.rounds.quorum for one in found} >= {3}
    for one in found:
        again = predict(one.entry[0])
        assert one.saved == pytest.approx(1.0 - report.tokens_per_second / again.tokens_per_second)
        assert one.left_out == pytest.approx(1.0 - again.tokens_per_step / report.tokens_per_step)
        rounds = one.entry[0].plan.gradients.rounds
        assert rounds.grace_seconds >= report.step_seconds - report.share("outer synchronisation") * report.step_seconds


def test_nobody_is_left_behind_among_like_devices_or_where_it_is_not_allowed() -> None:
    alike, made = held(slower=1.0), held()
    assert advise_quorum(alike, predict(alike)) == ()
    report = predict(made)
    few = replace(made.job, synchronize=SynchronizeSpec(kinds=(SyncKind.DILOCO,), most_left_out=0.001))
    assert with_quorum([(made, report)], few).entry is None
    assert "leaves out at most 0.1 %" in with_quorum([(made, report)], few).words
    asked = replace(made, job=few)
    assert advise_quorum(asked, report) == ()


def test_the_search_chooses_one_where_the_job_allows_it() -> None:
    near = samples.cluster(samples.nodes(devices_per_node=2), samples.nodes(devices_per_node=2, site="b"))
    device = near.groups[1].device
    peaks = {kind: peak / 20 for kind, peak in device.peak_flops.items()}
    slow = replace(device, name="slow", peak_flops=peaks, memory_bandwidth=device.memory_bandwidth / 20)
    cluster = replace(
        near,
        groups=(near.groups[0], replace(near.groups[1], device=slow)),
        wide_area=replace(near.wide_area, bandwidth=1e9),
    )
    fix = {"tensor": 1, "recompute": "none", "sequence_parallel": "off", "pipeline": 1, "replicate": 4}
    job = samples.job(constraints=Constraints(fix={**fix, "sync": "diloco"}))
    job = replace(job, synchronize=SynchronizeSpec(kinds=(SyncKind.DILOCO,)))
    waits = design(samples.model(vocab=4096), cluster, job, top=1)
    assert waits.design.plan.gradients.rounds.quorum == 0
    assert any("most_left_out=" in line for line in waits.why)
    allowed = replace(job, synchronize=replace(job.synchronize, most_left_out=0.6))
    found = design(samples.model(vocab=4096), cluster, allowed, top=1)
    assert found.design.plan.gradients.rounds.quorum == 2, "as many as are fast"
    assert found.report.tokens_per_second > 1.01 * waits.report.tokens_per_second
    assert found.report.tokens_per_step >= 0.4 * waits.report.tokens_per_step
    assert any("most_left_out allows it" in line for line in found.why)
    assert check_answer(found.design) == ()
    assert check(found.design) == ()
