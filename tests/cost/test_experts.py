"""Tokens gathered by all ranks of a grid of experts, or sent to the chosen ones: what each is predicted to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import catalog
from meshwright.cost import PlanTable, predict
from meshwright.spec.cluster import Precision
from meshwright.spec.model import Layer, Mixture, ModelSpec
from meshwright.spec.plan import Design, Dispatch, ExpertGrid
from meshwright.spec.report import LineName
from meshwright.spec.routing import Routing
from tests.support import designs, models

MACHINES = catalog.load_cluster("8xH100")


def mixed(top_k: int) -> ModelSpec:
    part = Mixture(width=models.WIDTH, hidden=64, experts=32, top_k=top_k, norm=models.NORM)
    return models.model("mixed", layer=Layer(mixer=models.attention(), transform=part), layers=2)


def laid(top_k: int, grid: ExpertGrid) -> Design:
    layout = designs.Layout(replicate=8, batch=512, microbatch=64, precision=Precision.BF16, experts=grid)
    entry = designs.design(mixed(top_k), layout)
    return replace(entry, cluster=MACHINES, plan=replace(entry.plan, cluster=MACHINES.name))


def seconds(top_k: int, dispatch: Dispatch, *, expert: int = 8, tensor: int = 1) -> float:
    report = predict(laid(top_k, ExpertGrid(expert=expert, tensor=tensor, dispatch=dispatch)))
    line = report.step.find(LineName.EXPERTS)
    assert line is not None
    return line.seconds


def test_a_gathered_token_travels_once_whatever_chose_it() -> None:
    gathered = [seconds(top_k, Dispatch.ALL_GATHER) for top_k in (1, 8, 32)]
    assert gathered == pytest.approx([gathered[0]] * 3)
    sent = [seconds(top_k, Dispatch.ALL_TO_ALL) for top_k in (1, 8, 32)]
    assert sent[0] < gathered[0] < sent[2]


def test_slices_of_experts_gather_what_all_ranks_have() -> None:
    assert seconds(2, Dispatch.ALL_GATHER, expert=4, tensor=2) > seconds(2, Dispatch.ALL_GATHER, expert=4)


def test_a_table_keeps_how_tokens_reach_experts() -> None:
    for dispatch in Dispatch:
        plan = laid(2, ExpertGrid(expert=4, tensor=2, dispatch=dispatch)).plan
        table = PlanTable.from_plan(plan)
        again = table.to_plan(0, model=plan.model, cluster=plan.cluster, sequence_length=plan.sequence_length)
        assert again.experts == plan.experts


def crossing(groups: int, *, software: str) -> float:
    """Seconds of tokens on their way on eight nodes, where a token may choose in a half of `groups` of experts."""
    machines, grid = catalog.load_cluster("64xH100"), ExpertGrid(expert=64)
    layout = designs.Layout(replicate=64, batch=262144, microbatch=4096, precision=Precision.BF16, experts=grid)
    routing = Routing(groups=groups, chosen_groups=max(groups // 2, 1))
    part = Mixture(width=models.WIDTH, hidden=64, experts=64, top_k=8, norm=models.NORM, routing=routing)
    model = models.model("grouped", layer=Layer(mixer=models.attention(), transform=part), layers=2)
    entry = designs.design(model, layout)
    plan, job = replace(entry.plan, cluster=machines.name), replace(entry.job, software=software)
    line = predict(replace(entry, cluster=machines, plan=plan, job=job)).step.find(LineName.EXPERTS)
    assert line is not None
    return line.seconds


def test_a_token_goes_once_to_a_rank_that_holds_several_of_its_experts() -> None:
    """Eight of 32 experts on eight ranks of a node: 5.25 ranks and not 8."""
    layout = designs.Layout(
        replicate=8, batch=65536, microbatch=8192, precision=Precision.BF16, experts=ExpertGrid(expert=8)
    )
    entry = designs.design(mixed(8), layout)
    entry = replace(entry, cluster=MACHINES, plan=replace(entry.plan, cluster=MACHINES.name))

    def sent(software: str) -> float:
        line = predict(replace(entry, job=replace(entry.job, software=software))).step.find(LineName.EXPERTS)
        assert line is not None
        return line.seconds

    share = sent("megatron-core-deepep") / sent("megatron-core")
    assert share == pytest.approx(1 - (7 / 8) ** 8, rel=0.1)  # and the delays of messages, which are as long


def test_groups_of_experts_keep_a_token_on_fewer_nodes() -> None:
    """A token sent to a node once, and from there to its experts (2412.19437): fewer nodes are fewer copies."""
    assert crossing(8, software="megatron-core-deepep") < 0.95 * crossing(1, software="megatron-core-deepep")
    assert crossing(4, software="megatron-core-deepep") < 0.95 * crossing(1, software="megatron-core-deepep")
    assert crossing(8, software="megatron-core") == crossing(1, software="megatron-core")
