"""Plans made for a trainer can be exported to it, are the best of those that can, and what cannot be said is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright
from meshwright import catalog, cost, search
from meshwright.cli import main
from meshwright.cost import PlanTable
from meshwright.cost.stacks import software
from meshwright.export import NotExpressible, Peer, Verdict, export, holder, read
from meshwright.export.peers import nearest
from meshwright.search.decide import legal_space
from meshwright.search.explore import Explorer
from meshwright.spec.errors import ConfigError, NoPlanFits
from meshwright.spec.job import Constraints, JobSpec, Switch
from tests.export.plans import LENGTH

pytestmark = pytest.mark.usefixtures("searched_once")

QUESTIONS = [
    ("llama-3.1-8b", "8xA100-40GB", ["batch_tokens=256Ki", "constraints.fix.pipeline=2"], tuple(Peer)),
    ("llama-3.1-8b", "16xH100", ["batch_tokens=1Mi", "sequence_length=8192"], tuple(Peer)),
    ("qwen3-30b-a3b", "32xH100", ["sequence_length=4096"], (Peer.TORCHTITAN, Peer.MEGATRON_LM)),
    ("gpt-39b", "512xA100-80GB", ["batch_tokens=3Mi"], (Peer.MEGATRON_LM, Peer.DEEPSPEED)),
]
# What most tests here ask, each search made once: few plans, in which context ranks and their exchanges are not.
ON_A100 = ("llama-3.1-8b", "16xA100-40GB")
FEW = ("batch_tokens=256Ki", "constraints.fix.context=1")
PLAN = ["plan", "-m", ON_A100[0], "-c", ON_A100[1], "--top", "1", *(word for each in FEW for word in ("--set", each))]


@pytest.mark.parametrize(
    ("model", "cluster", "sets", "peer"),
    [
        pytest.param(model, cluster, sets, peer, marks=[pytest.mark.slow] if number else [])
        for number, (model, cluster, sets, peers) in enumerate(QUESTIONS)
        for peer in peers
    ],
)
def test_every_plan_for_a_trainer_is_exported_and_says_the_same(
    model: str, cluster: str, sets: list[str], peer: Peer
) -> None:
    decision = meshwright.design(model, cluster, catalog.load_job(None, sets=sets), top=5, trainer=peer.value)
    assert decision.trainer == peer.value
    for entry in decision.ranked:
        made = replace(decision.design, plan=entry.plan)
        found = export(made, to=peer)
        assert read(found.text, to=peer) == nearest(made, to=peer)
        assert not [line for line in found.lines if line.verdict is Verdict.DIFFERS]


@pytest.mark.parametrize("peer", Peer)
def test_a_table_is_refused_row_by_row_as_plans_are(peer: Peer) -> None:
    spec, machines = catalog.load_model("llama-3.1-8b"), catalog.load_cluster("8xH100")
    asked = JobSpec(sequence_length=LENGTH, batch_tokens=16 * LENGTH, total_tokens=10**10)
    table = legal_space(spec, machines, asked).table
    table = table.take(np.arange(0, len(table), max(1, len(table) // 300)))
    refused = holder(peer.value).refused(table, model=spec, cluster=machines, job=asked)
    seen = 0
    for row in range(len(table)):
        plan = table.to_plan(row, model=spec.name, cluster=machines.name, sequence_length=LENGTH)
        made = meshwright.Design(model=spec, cluster=machines, job=asked, plan=plan)
        told: set[str] = set()
        try:
            export(made, to=peer)
        except NotExpressible as error:
            told = {problem.where for problem in error.problems}
        assert {where for where, mask in refused.items() if mask[row]} == told
        seen += not told
    assert 0 < seen < len(table)


@pytest.mark.parametrize("peer", Peer)
def test_a_search_for_a_trainer_that_stops_early_finds_the_same_best(peer: Peer) -> None:
    spec, machines, held = catalog.load_model("llama-3.1-8b"), catalog.load_cluster("8xH100"), holder(peer.value)
    asked = JobSpec(
        sequence_length=LENGTH,
        batch_tokens=16 * LENGTH,
        total_tokens=10**10,
        constraints=Constraints(forbid=("slices",), fix={"context": 1}),
    )
    space = legal_space(spec, machines, asked, trainer=held)
    whole, early = (
        Explorer(space, model=spec, cluster=machines, job=asked, trainer=held, exhaustive=limit) for limit in (10**7, 0)
    )
    for found in (whole, early):
        found.best(5)
    assert early.priced < whole.priced < space.count
    best = [float(np.min(np.where(found.prices.fits, found.scores(), np.inf))) for found in (whole, early)]
    assert best[0] == best[1]


def test_what_no_plan_can_mend_is_told_at_once() -> None:
    with pytest.raises(NoPlanFits, match="torchtitan cannot say the model mixtral-8x7b"):
        meshwright.design("mixtral-8x7b", "64xH100", trainer="torchtitan")
    job = catalog.load_job(None, sets=["constraints.fix.schedule=zb-h2", "constraints.fix.pipeline=2"])
    with pytest.raises(NoPlanFits, match=r"plan\.schedule\.kind: Megatron-LM cannot say the zb-h2 schedule"):
        meshwright.design("llama-3.1-8b", "8xH100", job, trainer="megatron")
    with pytest.raises(ConfigError, match="did you mean deepspeed"):
        meshwright.design("llama-3.1-8b", "8xH100", trainer="deepsped")


@pytest.mark.parametrize(
    ("peer", "cluster", "told"),
    [
        (
            "deepspeed",
            "8xH100",
            [
                "job.precision: deepspeed has no words for mxfp8 products; --set precision=bf16 (or fp16, fp32)",
                "job.precision: H100 has no mxfp8 arithmetic (rule precision-known); --set precision=fp8 (or ",
            ],
        ),
        (
            "deepspeed",
            "8xB200",
            ["job.precision: deepspeed has no words for mxfp8 products; --set precision=bf16 (or fp16, fp32)"],
        ),
        ("torchtitan", "8xH100", ["job.precision: H100 has no mxfp8 arithmetic (rule precision-known); --set "]),
    ],
)
def test_a_precision_that_cannot_be_is_told_for_every_reason_before_memory_is(
    peer: str, cluster: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "-m", "llama-3.1-405b", "-c", cluster, "--set", "precision=mxfp8", "--for", peer]
    assert main(words) == 2
    lines = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == len(told)
    assert all(line.startswith(words) for line, words in zip(lines, told, strict=True)), lines
    job = catalog.load_job(None, sets=["precision=mxfp8"])
    with pytest.raises(ConfigError) as caught:
        meshwright.design("llama-3.1-405b", cluster, job, trainer=peer)
    assert len(caught.value.problems) == len(told)


@pytest.mark.parametrize("peer", Peer)
def test_the_precisions_of_a_peer_are_those_that_it_can_be_told(peer: Peer) -> None:
    spec, machines = catalog.load_model("llama-3.1-8b"), catalog.load_cluster("8xB200")
    for kind in machines.groups[0].device.peak_flops:
        job = JobSpec(sequence_length=LENGTH, batch_tokens=16 * LENGTH, total_tokens=10**10, precision=kind)
        table = legal_space(spec, machines, job).lightest.rows_of(np.zeros(1, dtype=np.int64))
        refused = holder(peer.value).refused(table, model=spec, cluster=machines, job=job)
        unsaid = "plan.stages[*].groups[*].precision" in refused and bool(
            [words for words in refusals_of(peer, table, spec, machines, job) if f"{kind.value} products" in words]
        )
        assert unsaid == (kind not in holder(peer.value).precisions), kind


def refusals_of(peer: Peer, table: PlanTable, *asked: Any) -> list[str]:
    model, machines, job = asked
    plan = table.to_plan(0, model=model.name, cluster=machines.name, sequence_length=LENGTH)
    made = meshwright.Design(model=model, cluster=machines, job=job, plan=plan)
    return [problem.what for problem in holder(peer.value).problems(made)]


def test_questions_about_a_plan_for_a_trainer_are_held_to_it() -> None:
    asked = search.Question(
        model=catalog.load_model(ON_A100[0]),
        cluster=catalog.load_cluster(ON_A100[1]),
        job=catalog.load_job(None, sets=FEW),
        trainer=holder("megatron-lm"),
    )
    decision = search.design(asked.model, asked.cluster, asked.job, trainer=asked.trainer, top=1)
    answer = search.why_not(asked, decision, {"pipeline": 2})
    assert answer.plan is not None
    export(replace(decision.design, plan=answer.plan), to=Peer.MEGATRON_LM)


def test_the_command_plans_for_a_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    words = [*PLAN, "--for", "torchtitan"]
    assert main([*words, "--out", str(out)]) == 0
    assert "torchtitan: plan.schedule.kind" in capsys.readouterr().out
    assert main(["export", str(out), "--to", "torchtitan"]) == 0
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trainer"] == "torchtitan"


def test_a_plan_for_a_trainer_is_chosen_by_the_seconds_of_its_own_software() -> None:
    def found(*sets: str) -> search.Decision:
        job = catalog.load_job(None, sets=[*FEW, *sets])
        return meshwright.design(*ON_A100, job, top=1, trainer="megatron-lm")

    own, named, ours = found(), found("software=megatron-core"), found("software=torch")
    assert own.report.software == own.design.job.software == "megatron-core"
    assert own.design.plan == named.design.plan
    assert own.report.step_seconds == named.report.step_seconds
    assert ours.report.software == ours.design.job.software == "torch"
    assert own.design.plan != ours.design.plan
    moved = replace(ours.design, job=own.design.job)
    assert own.report.step_seconds < cost.predict(moved).step_seconds


def test_a_plan_for_a_trainer_says_whose_seconds_it_tells(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*PLAN, "--for", "megatron-lm"]
    assert main(asked) == 0
    assert "priced as megatron-core, the software of megatron-lm" in " ".join(capsys.readouterr().out.split())
    small = ["-m", "qwen3-0.6b", "-c", "2xH100", "--set", "batch_tokens=64Ki", "--top", "1"]
    titan = ["plan", *small, "--for", "torchtitan"]
    for switch in ("off", "on"):
        assert main([*titan, "--set", f"compile={switch}"]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert ("; as its file says, nothing is compiled (--set compile=on " in told) == (switch == "off")
    assert main([*asked, "--set", "software=torch"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "priced as torch, the software that the job names; megatron-lm's own is megatron-core" in told


@pytest.mark.parametrize("peer", Peer)
def test_a_saved_plan_for_a_trainer_is_predicted_as_it_was_chosen(peer: Peer, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert main([*PLAN, "--for", peer.value, "--out", str(out)]) == 0
    design = catalog.load_design(out)
    kept = search.read_decision(out, plan=design.plan)
    assert kept is not None
    assert design.job.software == kept.report.software == holder(peer.value).stack(JobSpec())
    assert cost.predict(design).step_seconds == kept.report.step_seconds
    step = next(row for row in meshwright.explain(out).rows if row.name == "step")
    assert step.predicted == kept.report.step_seconds


def test_questions_about_a_plan_for_a_trainer_are_priced_as_its_software() -> None:
    asked = search.Question(
        model=catalog.load_model(ON_A100[0]),
        cluster=catalog.load_cluster(ON_A100[1]),
        job=catalog.load_job(None, sets=FEW),
        trainer=holder("megatron-lm"),
    )
    decision = search.design(asked.model, asked.cluster, asked.job, trainer=asked.trainer, top=1)
    answer = search.why_not(asked, decision, {"tensor": 2})
    assert answer.report is not None
    assert answer.report.software == "megatron-core"
    swept = search.sweep(asked, ["batch_tokens=256Ki,512Ki"]).points[0].best
    assert swept is not None
    assert swept.step_seconds == decision.report.step_seconds


@pytest.mark.parametrize("peer", Peer)
def test_a_plan_for_a_trainer_is_chosen_without_the_document_mask_that_it_lacks(peer: Peer) -> None:
    job = catalog.load_job(None, sets=[*FEW, "constraints.fix.pipeline=1", "sequence_length=8192"])
    assert job.data.document_mask
    decision = meshwright.design("llama-3.1-8b", "16xA100-40GB", job, top=1, trainer=peer.value)
    unmasked = replace(job, data=replace(job.data, document_mask=False))
    assert decision.design.job.data == unmasked.data
    plain = meshwright.design("llama-3.1-8b", "16xA100-40GB", unmasked, top=1, trainer=peer.value)
    assert decision.design.plan == plain.design.plan
    assert decision.report.step_seconds == plain.report.step_seconds
    assert "document mask" not in [line.name for line in export(decision.design, to=peer).lines]
    told = f"documents that share a sequence see each other in {peer.value} as it is exported to: this design has "
    assert [line for line in decision.why if line.startswith(told)]
    assert not [line for line in plain.why if line.startswith(told)]


@pytest.mark.parametrize("switch", Switch)
@pytest.mark.parametrize("peer", Peer)
def test_every_trainer_has_a_stack_that_is_known(peer: Peer, switch: Switch) -> None:
    said = software(holder(peer.value).stack(JobSpec(compile=switch)))
    assert said.compiled == (peer is Peer.TORCHTITAN and switch is Switch.ON)  # as the file says compile.enable
