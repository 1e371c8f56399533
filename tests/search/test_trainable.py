"""What a search for plans to train lists, the runtime trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright import catalog, search
from meshwright.search.runtime_rules import RUNTIME_RULES
from meshwright.spec.cluster import Precision
from meshwright.spec.job import Switch
from meshwright.spec.plan import Design
from tests.support import models
from tests.support.space import emitted

CASES = {
    "plain": lambda: emitted(models.model(), ranks=4),
    "compiled": lambda: emitted(models.model(), ranks=4, compiled=Switch.ON),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plans_to_train_pass_every_rule_of_the_runtime(case: Callable[[], list[Design]]) -> None:
    designs = case()
    assert len(designs) > 100
    for entry in designs:
        for rule in RUNTIME_RULES:
            assert rule(entry) is None, f"{rule.name}: {entry.plan.describe()}"


def test_the_best_plan_of_a_job_that_compiles_can_be_trained() -> None:
    """A split backward is quickest here, and is not compiled."""
    model, machines = catalog.load_model("llama-3.1-8b"), catalog.load_cluster("8xA100")
    sets = ["batch_tokens=1Mi", "sequence_length=2048", "constraints.fix.pipeline=2", "constraints.fix.context=1"]
    job = catalog.load_job(None, sets=sets)
    written = search.design(model, machines, job, top=1)
    compiled = search.design(model, machines, replace(job, compile=Switch.ON), top=3)
    assert any(rule(replace(written.design, job=compiled.design.job)) for rule in RUNTIME_RULES)
    for entry in compiled.ranked:
        laid = replace(compiled.design, plan=entry.plan)
        assert not [rule.name for rule in RUNTIME_RULES if rule(laid)]
    assert not compiled.predicts_only


def test_the_best_plan_on_tpus_is_priced_as_xla_and_marked() -> None:
    model, machines = catalog.load_model("tiny"), catalog.load_cluster("8xTPU-v5p")
    job = catalog.load_job(None, sets=["batch_tokens=64Ki"])
    decision, named = (search.design(model, machines, replace(job, software=name)) for name in ("auto", "xla"))
    assert decision.report.software == "xla"
    assert decision.ranked == named.ranked
    assert "rule runtime-devices" in " ".join(problem.why for problem in decision.predicts_only)


def test_plan_weighs_what_can_only_be_predicted_and_train_takes_what_it_can_train() -> None:
    """B200s are faster in nvfp4, which this runtime does not train on them."""
    model, machines = catalog.load_model("llama-3.2-1b"), catalog.load_cluster("2xB200")
    sets = ["batch_tokens=64Ki", "sequence_length=2048", "precision=nvfp4", 'other_precisions=["bf16"]']
    job = catalog.load_job(None, sets=sets)
    weighed = search.design(model, machines, job, top=1)
    (problem,) = weighed.predicts_only
    assert problem.fix.startswith("choose bf16")
    trained = search.design(model, machines, job, top=1, trainable=True)
    assert not trained.predicts_only
    assert trained.design.plan.first_group.precision is Precision.BF16


def test_devices_without_bf16_train_in_fp16() -> None:
    model, machines = catalog.load_model("llama-3.2-1b"), catalog.load_cluster("2xV100-32GB")
    job = catalog.load_job(None, sets=["batch_tokens=64Ki", "sequence_length=2048"])
    trained = search.design(model, machines, job, top=1, trainable=True)
    assert not trained.predicts_only
    assert trained.design.plan.first_group.precision is Precision.FP16


def test_context_ranks_on_devices_without_flash_are_trained_in_fp32() -> None:
    model, machines = catalog.load_model("llama-3.2-1b"), catalog.load_cluster("8xV100-32GB")
    job = catalog.load_job(None, sets=["batch_tokens=512Ki", "sequence_length=32768", "constraints.fix.context=8"])
    (problem,) = search.design(model, machines, job, top=1).predicts_only
    assert "context ranks in fp16 on devices before Ampere" in problem.what
    trained = search.design(model, machines, job, top=1, trainable=True)
    assert not trained.predicts_only
    assert trained.design.plan.first_group.precision is Precision.FP32
