from __future__ import annotations

import pytest

from meshwright import catalog, search
from meshwright.search.constraints import limits
from meshwright.spec.errors import ConfigError, NoPlanFits
from meshwright.spec.job import Constraints
from tests.search import search_samples as samples

EIGHT = samples.cluster(samples.nodes(devices_per_node=8))


def test_values_are_read_into_the_columns_of_a_plan() -> None:
    asked = limits(Constraints(fix={"zero": 3, "tensor": "8", "sequence_parallel": "true"}, forbid=("recompute=full",)))
    assert asked.fixed == {"zero": "zero3", "tensor": 8, "sequence_parallel": "on"}
    assert asked.refusal("tensor", 4) == "job.constraints.fix.tensor"
    assert asked.refusal("recompute", "full") == "job.constraints.forbid[0]"
    assert asked.allows("recompute", "none")
    assert asked.allows("pipeline", 7)


def test_a_bare_name_forbids_every_use() -> None:
    asked = limits(Constraints(forbid=("pipeline", "zero", "recompute")))
    assert asked.allows("pipeline", 1)
    assert not asked.allows("pipeline", 2)
    assert asked.allows("zero", "none")
    assert not asked.allows("zero", "zero1")
    assert not asked.allows("recompute", "selective")


@pytest.mark.parametrize(
    ("constraints", "says"),
    [
        (Constraints(fix={"tensr": 2}), "job.constraints.fix.tensr: 'tensr' is not a column of a plan; did you mean"),
        (Constraints(forbid=("pipelin",)), "did you mean 'pipeline'?"),
        (Constraints(fix={"tensor": "many"}), "expected a whole number of 1 or more, got 'many'"),
        (Constraints(fix={"recompute": "ful"}), "'ful' is not a recompute; did you mean 'full'?"),
        (Constraints(forbid=("microbatch",)), "every plan has a microbatch; write microbatch=VALUE"),
        (Constraints(devices="some"), "job.constraints.devices: 'some' is not a choice; choose all or any"),
        (Constraints(fix={"tensor": 4}, forbid=("tensor=4",)), "tensor is fixed at 4 and job.constraints.forbid[0]"),
        (Constraints(fix={"pipeline": 4}, forbid=("pipeline",)), "pipeline is fixed at 4"),
        (Constraints(fix={"replicate": 2, "shard": 2, "data": 8}), "replicate 2 x shard 2 is not data 8"),
        (Constraints(fix={"zero": 0, "shard": 4}), "zero none leaves nothing to shard over 4 ranks"),
        (Constraints(fix={"chunks": 2, "schedule": "1f1b"}), "chunks 2 belong to the interleaved schedule"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_told(constraints: Constraints, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        limits(constraints)
    assert says in str(raised.value)


def test_every_wrong_constraint_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        limits(Constraints(fix={"tensr": 2, "zero": 7}, forbid=("chunks=x",)))
    assert len(raised.value.problems) == 3


def test_short_names_are_columns_in_files_and_settings_too() -> None:
    asked = Constraints(fix={"tp": 2, "PP": 4}, forbid=("ac=full", "ep"))
    assert asked == Constraints(fix={"tensor": 2, "pipeline": 4}, forbid=("recompute=full", "expert"))
    job = catalog.load_job(None, sets=["job.constraints.fix.tp=2", 'constraints.forbid=["sp=on"]'])
    assert job.constraints == Constraints(fix={"tensor": 2}, forbid=("sequence_parallel=on",))
    assert limits(job.constraints).fixed == {"tensor": 2}
    with pytest.raises(ConfigError, match="tensor is named twice"):
        catalog.load_job(None, sets=["constraints.fix.tp=2", "constraints.fix.tensor=4"])


def test_more_stages_than_a_model_has_blocks_are_told_with_how_many_it_has() -> None:
    with pytest.raises(NoPlanFits) as raised:
        search.design(
            samples.model(layers=2),
            samples.cluster(samples.nodes(devices_per_node=8)),
            samples.job(constraints=Constraints(fix={"pipeline": 100_000})),
        )
    text = str(raised.value)
    assert "100,000 stages are more than the 4 blocks of the model (2 layers, embedding and head)" in text
    assert "choose 1, 2 or 4" in text


@pytest.mark.parametrize("fixed", ["expert", "expert_tensor"])
def test_ranks_for_experts_of_a_model_without_any_are_refused(fixed: str) -> None:
    with pytest.raises(NoPlanFits) as raised:
        search.design(
            samples.model(),
            samples.cluster(samples.nodes(devices_per_node=8)),
            samples.job(constraints=Constraints(fix={fixed: 7})),
        )
    text = str(raised.value)
    assert f"job.constraints.fix.{fixed}: 7 leaves no legal plan" in text
    assert "the model has no experts, rule experts-divide" in text
