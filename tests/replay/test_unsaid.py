"""What a source keeps to itself, and FLOP/s in place of seconds."""

from __future__ import annotations

import pytest

from meshwright.replay import words
from meshwright.replay.express import express
from meshwright.replay.pricing import priced
from meshwright.replay.published import replay, replay_all
from meshwright.replay.runs import Run
from meshwright.spec.model import LatentAttention
from meshwright.spec.plan import Offload, Recompute, ScheduleKind, Sharding

MIXTRAL = {
    "id": "mixtral",
    "source_id": "S",
    "arch": "moe",
    "layers": "56",
    "hidden": "6144",
    "heads": "48",
    "kv_heads": "8",
    "head_dim": "128",
    "gated": "yes",
    "vocab": "32000",
    "seq": "4096",
    "n_experts": "8",
    "topk": "2",
    "expert_ffn": "16384",
    "gpu": "H100-80GB-SXM",
    "n_gpus": "128",
    "gpus_per_node": "8",
    "peak_tflops": "989.5",
    "framework": "Megatron-Core",
    "tp": "2",
    "pp": "8",
    "dp": "8",
    "ep": "8",
    "etp": "1",
    "zero": "1",
    "gbs": "256",
    "precision": "bf16",
    "status": "ok",
    "flop_conv": "Megatron MFU vs 989.5 (3x fwd, full attention reproduces it)",
}


def row(**changes: str) -> Run:
    return Run(line=2, columns={**MIXTRAL, **changes})


def test_seconds_of_a_share_are_those_of_the_rate_that_is_printed_beside_it():
    """2504.14960 prints 487.7 TFLOP/s as 49.3 % of 989.5."""
    share, rate = row(mfu_pct="49.3").seconds, row(tflops_gpu="487.7").seconds
    assert share == pytest.approx(rate, rel=2e-3)


def test_three_times_forward_with_attention_to_all():
    """2 x 64.9 GFLOP a token and layer of its own parameters, twice 4 s h of attention: counted by hand."""
    layer = 2 * (2 * 6144 * 6144 + 2 * 6144 * 1024 + 2 * 3 * 6144 * 16384 + 6144 * 8) + 4 * 4096 * 6144
    flops = 3 * 256 * 4096 * (56 * layer + 2 * 6144 * 32000)
    assert row(tflops_gpu="400").seconds == pytest.approx(flops / (400e12 * 128))


@pytest.mark.parametrize(
    "changes",
    [{"flop_conv": "of some kind"}, {"heads": ""}, {"mfu_pct": "", "tflops_gpu": ""}, {"peak_tflops": ""}],
)
def test_a_rate_without_its_count_is_no_time(changes):
    assert row(**{"mfu_pct": "49.3", **changes}).seconds is None


def test_stages_on_a_rank_that_are_kept_secret_are_tried():
    said = "token-drop capacity factor 1; vpp and mbs not printed"
    found = express(row(extra=said)).others
    chunks = {(one.plan.schedule.kind, one.plan.schedule.chunks) for one in found}
    assert (ScheduleKind.INTERLEAVED, 7) in chunks
    assert (ScheduleKind.ONE_F_ONE_B, 1) in chunks
    for one in found:
        assert one.plan.batch == 256
        assert [stage.start for stage in one.plan.stages] == [0, *(stage.stop for stage in one.plan.stages[:-1])]
        assert one.plan.stages[-1].stop == 58


def test_only_where_the_table_says_so():
    assert {one.plan.schedule.chunks for one in express(row(schedule="1f1b")).others} == {1}
    assert not express(row(mbs="1", extra="dispatcher=deepep")).others
    assert not express(row(mbs="1", pp="1", dp="64", extra="vpp not printed")).others


DENSE = {"arch": "llama", "n_experts": "", "topk": "", "ep": "", "expert_ffn": "", "ffn": "16384", "mbs": "1"}


def test_layers_whose_activations_are_offloaded_are_the_first_of_a_stage():
    plan = express(row(**DENSE, pp="1", dp="64", offload="act-40-layers", recompute="none")).design.plan
    (first, rest) = plan.stages[0].groups
    assert (first.start, first.stop, first.offload) == (0, 41, Offload.ACTIVATIONS)
    assert (rest.start, rest.stop, rest.offload) == (41, 58, Offload.NONE)
    whole = express(row(**DENSE, offload="activations", recompute="none")).design.plan
    assert {group.offload for stage in whole.stages for group in stage.groups} == {Offload.ACTIVATIONS}


def test_what_cannot_have_run_without_recompute_ran_with_less_in_memory():
    """Of 64 sequences at once one device holds no layer's activations; where a source says none, it is believed."""
    large = {**DENSE, "tp": "1", "pp": "1", "dp": "128", "zero": "3", "mbs": "16", "gbs": "2048"}
    silent, said = express(row(**large, recompute="")), express(row(**large, recompute="none"))
    found = priced(silent)
    ways = (
        {group.recompute for group in found.design.plan.groups},
        {group.offload for group in found.design.plan.groups},
    )
    assert ways != ({Recompute.NONE}, {Offload.NONE})
    assert found.report.fit_probability > priced(said).report.fit_probability
    assert priced(said).design == said.design
    assert not said.smaller


def test_what_is_computed_again_already_is_not_tried_with_less():
    found = express(row(**DENSE | {"pp": "1", "dp": "64"}, framework="LLaMA-Factory", recompute=""))
    assert "every layer computed again, as in the stack's own scripts" in found.assumed
    assert found.smaller
    for one in (found.design, *found.smaller):
        assert {group.recompute for group in one.plan.groups} == {Recompute.FULL}


def test_a_pipeline_of_deepspeed_computes_layers_again():
    found = express(row(**DENSE, framework="DeepSpeed 3D", recompute=""))
    assert found.design.plan.first_group.recompute is Recompute.FULL
    assert any("as in the stack's own scripts" in told for told in found.assumed)


@pytest.mark.parametrize(("layers", "counts"), [("30", [7, 8, 8, 7]), ("29", [8, 7, 7, 7]), ("32", [8, 8, 8, 8])])
def test_embedding_and_head_stand_for_a_layer_where_that_comes_out_even(layers: str, counts: list[int]):
    """As Llama 3's 126 layers on 16 stages of 8 (2407.21783)."""
    stages = express(row(**DENSE, layers=layers, pp="4", dp="16")).design.plan.stages
    held = [stage.stop - stage.start for stage in stages]
    assert [count - (index in (0, 3)) for index, count in enumerate(held)] == counts


@pytest.mark.parametrize(
    ("width", "tensor", "heads"), [("1024", "1", 16), ("4096", "8", 32), ("13824", "8", 96), ("14400", "8", 120)]
)
def test_heads_that_are_not_printed_suit_the_width_and_the_tensor_ranks(width: str, tensor: str, heads: int):
    unsaid = {"hidden": width, "tp": tensor, "dp": str(128 // int(tensor)), "pp": "1"}
    found = express(row(**{**DENSE, **unsaid, "heads": "", "kv_heads": "", "head_dim": "", "ffn": ""}))
    assert found.design.model.layers[0].mixer.heads == heads


def test_an_interleaved_schedule_without_a_number_of_stages_on_a_rank_tries_them():
    found = express(row(**DENSE, layers="126", pp="16", dp="4", schedule="interleaved-1f1b"))
    assert any("predicted fastest" in told for told in found.assumed)
    loops = {one.plan.schedule.chunks: one.plan for one in found.others}
    assert set(loops) == {2, 4, 8}
    first, *between, last = (stage.stop - stage.start for stage in loops[8].stages)
    assert (first, set(between), last) == (1, {1}, 1)


def test_layers_that_are_computed_again_are_the_first_of_a_stage():
    for said in ("full, 3 of 7 layers", "block 3"):
        stages = express(row(**DENSE, recompute=said)).design.plan.stages
        again = [
            sum(group.stop - group.start for group in stage.groups if group.recompute is Recompute.FULL)
            for stage in stages
        ]
        assert again == [4, *[3] * 7]


@pytest.mark.parametrize(("bounds", "layers"), [("0, 9, 15, 21, 30", [7, 6, 6, 5]), ("0, 5, 10, 16, 24", [5, 5, 6, 8])])
def test_boundaries_of_stages_count_layers_or_all_modules_of_a_pipeline(bounds: str, layers: list[int]):
    """DeepSpeed's GPT2ModelPipe has two modules before its 24 layers and four behind."""
    stages = express(
        row(**DENSE, layers="24", pp="4", dp="16", extra=f"layer boundaries=[{bounds}]")
    ).design.plan.stages
    held = [stage.stop - stage.start - (index in (0, 3)) for index, stage in enumerate(stages)]
    assert held == layers


def test_torchtitan_gathers_once_a_step_in_a_pipeline_and_divides_sequences():
    titan = {**DENSE, "framework": "torchtitan", "zero": "3", "sp": ""}
    piped, flat = (express(row(**titan, **how)).design.plan.first_group for how in ({}, {"pp": "1", "dp": "64"}))
    assert (piped.sharding, flat.sharding) == (Sharding.OPTIMIZER, Sharding.PARAMETERS)
    assert piped.sequence_parallel


def test_a_device_whose_host_is_unknown_offloads_nothing_where_nothing_is_said():
    """Of MI300A nothing is known of the way to the host's memory: what does not fit is predicted as it is told."""
    large = {
        "tp": "1",
        "pp": "1",
        "dp": "128",
        "zero": "3",
        "mbs": "16",
        "gbs": "2048",
        "recompute": "",
        "framework": "JAX",
    }
    found = priced(express(row(**DENSE | large | {"gpu": "MI300A", "gpus_per_node": ""})))
    assert {group.offload for group in found.design.plan.groups} == {Offload.NONE}


def test_rows_priced_together_are_those_priced_alone():
    """Of another batch, microbatch and recompute each, and one that no plan says."""
    runs = [row(**DENSE | {"mbs": mbs, "gbs": gbs}) for mbs, gbs in (("1", "256"), ("2", "512"))]
    runs += [row(**DENSE, dp="3"), row(**DENSE, recompute="full")]
    assert replay_all(runs) == [replay(run) for run in runs]


def test_llama_3_interleaved_its_stages_and_a_policy_of_maxtext_keeps_products():
    stages = {**DENSE, "framework": "Llama 3", "tp": "1", "pp": "4", "dp": "", "schedule": "", "vpp": ""}
    assert "as many stages on a rank as are predicted fastest" in express(row(**stages)).assumed
    other = express(row(**stages | {"framework": "Megatron-Core"}))
    assert "as many stages on a rank as are predicted fastest" not in other.assumed
    assert words.recompute("save_dot_with_context_except_mlp") == "selective"


def test_what_is_taken_of_what_is_unsaid_is_told():
    found = replay(row(extra="vpp and mbs not printed"))
    assert found.assumed[-1].startswith("so taken: microbatches of ")
    assert found.assumed[-1].endswith("recompute")
    said = replay(row(recompute="full", mbs="1", vpp="2"))
    assert not any(words.startswith("so taken") for words in said.assumed)


@pytest.mark.parametrize(
    ("cells", "tried"),
    [
        ({}, True),
        ({"framework": "NeMo 2.0"}, True),
        ({"mbs": "1"}, False),
        ({"schedule": "1f1b"}, False),
        ({"vpp": "1"}, False),
        ({"framework": "Colossal-AI"}, False),
    ],
)
def test_megatron_core_may_have_interleaved_where_microbatch_and_schedule_are_not_told(cells, tried):
    found = express(row(**{**DENSE, "mbs": "", **cells}))
    chunks = {one.plan.schedule.chunks for one in (found.design, *found.others)}
    assert (len(chunks) > 1) is tried
    assert ("one stage on a rank or several, whatever is predicted fastest" in found.assumed) is tried


@pytest.mark.parametrize(
    ("framework", "counts", "taken"),
    [("Megatron-Core", {8, 15, 22}, "full recompute of 30 of 60 layers"), ("Accelerate", set(), "full recompute")],
)
def test_megatron_core_may_have_computed_some_layers_again(framework: str, counts: set[int], taken: str):
    """A quarter, a half or three quarters of a stage's, and not all of them where fewer leave room."""
    tight = {**DENSE, "tp": "4", "pp": "2", "dp": "16", "mbs": "8", "gbs": "2048", "layers": "60", "zero": "1"}
    run = row(**tight, framework=framework, recompute="", flash="yes")
    some = [one.plan.stages for one in express(run).smaller if len(one.plan.stages[0].groups) > 1]
    assert {stages[0].groups[0].stop - 1 for stages in some} == counts
    for first, rest in (stage.groups for stages in some for stage in stages):
        assert (first.recompute, rest.recompute) == (Recompute.FULL, Recompute.NONE)
    assert replay(run).assumed[-1] == f"so taken: microbatches of 8, {taken}"


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("", "8 adapters of 400 Gb/s a node, for no network is told"),
        ("InfiniBand NDR 400Gbps", "400 Gb/s are those of a node, not of every adapter"),
        ("InfiniBand NDR", ""),
        ("8x400Gb/s", ""),
        ("NDR 400 Gb/s per GPU", ""),
        ("InfiniBand NDR 400Gb/s per node", ""),
        ("InfiniBand 3200Gb/s", ""),
    ],
)
def test_a_network_that_is_left_open_is_told(link: str, told: str) -> None:
    found = [entry for entry in express(row(inter_link=link)).assumed if "Gb/s" in entry]
    assert found == ([told] if told else [])


def test_the_network_of_one_node_is_no_assumption() -> None:
    assert not any("adapter" in entry for entry in express(row(n_gpus="8", tp="1", pp="1")).assumed)


@pytest.mark.parametrize(
    ("gpu", "memory", "told"), [("V100", "", True), ("V100", "16", False), ("V100-32GB", "", False)]
)
def test_a_memory_that_is_left_open_is_told(gpu: str, memory: str, told: bool) -> None:
    found = express(row(gpu=gpu, gpu_mem_gb=memory, precision="fp16")).assumed
    assert ("V100-32GB, for no memory is told" in found) == told


def test_latents_are_those_that_a_row_tells() -> None:
    cells = {"arch": "moe-mla", "head_dim": ""}
    plain, said = express(row(**cells)), express(row(**cells, extra="kv_lora_rank=256 q_lora_rank=0"))
    assert any("latents of DeepSeek-V3" in entry for entry in plain.assumed)
    assert not any("latents of DeepSeek-V3" in entry for entry in said.assumed)
    mixers = {layer.mixer for layer in said.design.model.layers}
    assert {(mixer.query_rank, mixer.kv_rank) for mixer in mixers if isinstance(mixer, LatentAttention)} == {
        (None, 256)
    }
