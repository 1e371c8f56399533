"""What tables say of mixtures: places at experts, and what of a step is captured."""

from __future__ import annotations

import pytest

from meshwright.cost import predict
from meshwright.replay.express import express
from meshwright.replay.models import InexpressibleError
from meshwright.replay.runs import Run
from meshwright.replay.stages import filled
from meshwright.spec.model import Mixture
from meshwright.spec.optimizer import Moments

ROW = {
    "id": "small",
    "source_id": "S",
    "arch": "moe",
    "layers": "4",
    "hidden": "2048",
    "heads": "16",
    "gated": "yes",
    "vocab": "32000",
    "seq": "4096",
    "n_experts": "16",
    "topk": "2",
    "expert_ffn": "1024",
    "gpu": "B200",
    "n_gpus": "8",
    "framework": "Megatron-Bridge",
    "ep": "8",
    "mbs": "1",
    "gbs": "64",
    "precision": "bf16",
    "status": "ok",
}


def told(extra: str, **changes: str) -> Run:
    return Run(line=2, columns={**ROW, **changes, "extra": extra})


@pytest.mark.parametrize(
    ("extra", "software"),
    [
        ("", "megatron-bridge"),
        ("cuda_graph=transformer_engine:attn", "megatron-bridge"),
        ("cuda_graph=transformer_engine:moe_router+moe_preprocess", "megatron-bridge-router-graphs"),
        ("cuda_graph=transformer_engine:attn+moe_router; with MTP", "megatron-bridge-layer-graphs"),
        ("cuda_graph=full_iteration:; dispatcher=deepep", "megatron-bridge-deepep-step-graph"),
        ("cuda_graph=local:full_iteration; moe_a2a_overlap", "megatron-bridge-overlap-step-graph"),
    ],
)
def test_what_is_captured_chooses_the_software(extra: str, software: str) -> None:
    assert express(told(extra)).design.job.software == software


@pytest.mark.parametrize(
    ("extra", "capacity"), [("capacity factor 1.25", 1.25), ("token-drop capacity factor 1", None), ("", None)]
)
def test_places_at_experts_are_as_many_as_a_row_says(extra: str, capacity: float | None) -> None:
    mixture = express(told(extra, gpu="TPU v6e", framework="MaxText", ep="")).design.model.layers[0].transform
    assert isinstance(mixture, Mixture)
    assert mixture.routing.capacity == capacity


@pytest.mark.parametrize(
    ("layers", "pipeline", "extra", "each"),
    [
        (61, 16, "with MTP", [4] * 15 + [2]),
        (61, 8, "with MTP", [8] * 7 + [6]),
        (61, 4, "stage_layers=16+15+15+15; with MTP", [16, 15, 15, 16]),
        (9, 8, "with MTP", [2, 2, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_a_module_that_predicts_one_token_more_is_a_layer_of_the_last_stage(
    layers: int, pipeline: int, extra: str, each: list[int]
) -> None:
    """4 layers in 15 of 16 stages, and one beside the module in the last, whose head gives logits twice."""
    told_so = {"layers": str(layers), "pp": str(pipeline), "n_gpus": "128", "ep": "2"}
    design = express(told(extra, **told_so)).design
    assert len(design.model.layers) == layers + 1
    assert design.model.head.tokens == 2.0
    found = [stage.groups[-1].stop - stage.groups[0].start for stage in design.plan.stages]
    assert [found[0] - 1, *found[1:-1], found[-1] - 1] == each


def test_a_capacity_that_leaves_no_token_is_not_scored() -> None:
    with pytest.raises(InexpressibleError, match="capacity factor of 0"):
        express(told("capacity factor 0"))


@pytest.mark.parametrize("said", ["mlp+moe", "mlp,moe", "[mlp,moe]"])
def test_modules_that_run_again_are_read_however_they_are_joined(said: str) -> None:
    run = told(f"recompute_modules={said}; with MTP", recompute="selective")
    assert express(run).design.job.software == "megatron-bridge:mlp+moe"


V3 = {
    **ROW,
    "model": "deepseek-v3",
    "arch": "moe-mla",
    "layers": "61",
    "hidden": "7168",
    "heads": "128",
    "ffn": "18432",
    "vocab": "129280",
    "n_experts": "256",
    "topk": "8",
    "expert_ffn": "2048",
    "n_shared": "1",
    "gpu": "H800-80GB",
    "n_gpus": "2048",
    "gpus_per_node": "8",
    "pp": "16",
    "dp": "128",
    "ep": "64",
    "schedule": "dualpipe",
    "zero": "1",
    "gbs": "15360",
    "precision": "fp8",
}


@pytest.mark.parametrize("framework", ["HAI-LLM", "DeepSeek (HAI-LLM)", "DeepSeek"])
def test_deepseek_trains_as_its_report_says(framework: str) -> None:
    """180 thousand hours of H800 a trillion tokens (2412.19437) are 19.9 s a step of 15,360 sequences."""
    found = express(Run(line=2, columns={**V3, "framework": framework}))
    assert found.design.job.software == "megatron-core-deepep-overlap:mla_up_proj+layernorm+moe_act"
    assert found.design.job.optimizer.state is Moments.BF16
    assert "moments in bf16 (2412.19437, 3.3.3)" in found.assumed
    predicted = predict(found.design)
    assert predicted.step_seconds == pytest.approx(19.9, rel=0.05)
    assert predicted.fits


@pytest.mark.parametrize(
    ("changes", "modules"),
    [({"recompute": "full"}, False), ({"recompute": "none"}, False), ({"recompute": "selective"}, True), ({}, True)],
    ids=["all", "nothing", "selective", "unsaid"],
)
def test_what_deepseek_computes_again_gives_way_to_what_a_run_says(changes: dict[str, str], modules: bool) -> None:
    design = express(Run(line=2, columns={**V3, "framework": "HAI-LLM", **changes})).design
    assert (":" in design.job.software) == modules
    group = design.plan.first_group.recompute
    assert group == (changes.get("recompute") or "selective")


def test_deepseek_in_another_stack_is_that_stack() -> None:
    other = express(Run(line=2, columns={**V3, "framework": "Megatron-Core (DeepSeek recipe)"})).design
    assert other.job.software == "megatron-core"


def test_the_last_stage_has_the_layer_that_predicts_one_token_more() -> None:
    assert filled(62, 16)[-2:] == [61, 64]
    assert filled(62, 32)[-2:] == [62, 64]
