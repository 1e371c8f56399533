"""Searching among compressed gradients: where they save time, and the job allows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.cost.ways import ways_of_meeting
from meshwright.search import Decision, design
from meshwright.search.check import check, check_answer
from meshwright.search.rules import Scope
from meshwright.spec.cluster import Link
from meshwright.spec.compression import AcpSgd, Compression, OneBit, PowerSgd, TopK
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Constraints, JobSpec
from meshwright.spec.synchronize import GradientSync, SynchronizeSpec
from tests.search import search_samples as samples

MODEL = samples.model(vocab=4096)
REPLICAS = {"tensor": 1, "pipeline": 1, "recompute": "none", "context": 1}


def asked(*compressions: Compression, fix: dict[str, Any] | None = None) -> JobSpec:
    job = samples.job(constraints=Constraints(fix=REPLICAS | (fix or {})))
    return replace(job, synchronize=SynchronizeSpec(compressions=compressions))


def chosen(job: JobSpec, *, bandwidth: float = 1e6, devices: int = 1) -> Decision:
    """Between two nodes of so many devices that little joins, or much."""
    nodes = samples.nodes(devices_per_node=devices, num_nodes=2)
    return design(MODEL, samples.cluster(replace(nodes, nic=replace(nodes.nic, bandwidth=bandwidth))), job, top=3)


def test_between_slow_nodes_gradients_are_compressed_where_that_is_allowed() -> None:
    free, held = chosen(asked(PowerSgd(rank=2), AcpSgd(rank=1))), chosen(asked())
    assert free.design.plan.gradients.compression == AcpSgd(rank=1)
    assert held.design.plan.gradients.compression is None
    assert free.report.step_seconds < 0.9 * held.report.step_seconds
    assert check_answer(free.design) == ()
    assert check(free.design, scopes=frozenset({Scope.PLAN, Scope.RUNTIME})) == ()
    assert any("gradients that meet by powersgd" in line and "numerics differ" in line for line in free.why)
    (problem,) = check_answer(replace(free.design, job=held.design.job))
    assert problem.why == "rule compression-is-asked"
    assert "--set 'job.synchronize.compressions=[{kind = \"acpsgd\", rank = 1, start_step = 0}]'" in problem.fix


def test_between_slow_islands_that_shard_inside_so_are_those_of_shards() -> None:
    inside = {"offload": "none", "zero": "zero3"}
    free, held = (chosen(asked(*kinds, fix=inside), devices=4) for kinds in ((PowerSgd(rank=2), AcpSgd(rank=1)), ()))
    plan = free.design.plan
    assert (plan.replicate, plan.shard, plan.gradients.compression) == (2, 4, AcpSgd(rank=1))
    assert held.design.plan.gradients.compression is None
    assert free.report.step_seconds < 0.1 * held.report.step_seconds
    assert check_answer(free.design) == ()
    assert check(free.design, scopes=frozenset({Scope.PLAN, Scope.RUNTIME})) == ()
    ways = {way.word: way for way in ways_of_meeting(free.design)}
    assert ways["acpsgd"].step_seconds == pytest.approx(free.report.step_seconds, rel=1e-9)
    assert ways["every_step"].step_seconds == pytest.approx(held.report.step_seconds, rel=1e-9)


def test_parameters_in_the_hosts_memory_are_not_beside_them() -> None:
    host = Link(bandwidth=1e10, latency_seconds=1e-5)
    nodes = samples.nodes(devices_per_node=2, num_nodes=2, host=host)
    slow = samples.cluster(replace(nodes, nic=replace(nodes.nic, bandwidth=1e6)))
    found = design(MODEL, slow, asked(PowerSgd(rank=2), fix={"offload": "parameters"}), top=3).design
    assert found.plan.gradients.compression is None
    refused = replace(found, plan=replace(found.plan, gradients=GradientSync(compression=PowerSgd(rank=2))))
    (problem,) = check(refused, scopes=frozenset({Scope.PLAN}))
    assert problem.what.startswith("powersgd of gradients")


def test_where_nothing_is_slow_they_are_not() -> None:
    found = chosen(asked(PowerSgd(rank=2), TopK(), OneBit()), bandwidth=1e12)
    assert found.design.plan.gradients.compression is None


def test_a_kind_is_fixed_by_its_name_and_named_once() -> None:
    found = chosen(asked(PowerSgd(rank=3), fix={"sync": "powersgd"}), bandwidth=1e12)
    assert found.design.plan.gradients.compression == PowerSgd(rank=3)
    with pytest.raises(ConfigError, match="powersgd is named twice"):
        chosen(asked(PowerSgd(rank=3), PowerSgd(rank=4)))
    with pytest.raises(ConfigError, match=r"job.synchronize.compressions\[0\].rank: factors of 0 columns"):
        chosen(asked(PowerSgd(rank=0)))


def test_a_large_space_finds_what_a_small_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    job = asked(PowerSgd(rank=2), AcpSgd(rank=1), TopK(share=0.001))
    whole = chosen(job)
    monkeypatch.setattr(
        "meshwright.search.explore.Explorer.__init__.__kwdefaults__", {"trainer": None, "exhaustive": 0}
    )
    climbed = chosen(job)
    assert climbed.report.step_seconds == pytest.approx(whole.report.step_seconds, rel=1e-3)
