"""Searching among compressed gradients: where they save time, and the job allows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.search import Decision, design
from meshwright.search.check import check, check_answer
from meshwright.search.rules import Scope
from meshwright.spec.compression import AcpSgd, Compression, OneBit, PowerSgd, TopK
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Constraints, JobSpec
from meshwright.spec.synchronize import SynchronizeSpec
from tests.search import search_samples as samples

MODEL = samples.model(vocab=4096)
REPLICAS = {"tensor": 1, "pipeline": 1, "recompute": "none", "context": 1}


def asked(*compressions: Compression, fix: dict[str, Any] | None = None) -> JobSpec:
    job = samples.job(constraints=Constraints(fix=REPLICAS | (fix or {})))
    return replace(job, synchronize=SynchronizeSpec(compressions=compressions))


def chosen(job: JobSpec, *, bandwidth: float = 1e6) -> Decision:
    """Between two nodes that little joins, or much."""
    nodes = samples.nodes(devices_per_node=1, num_nodes=2)
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
