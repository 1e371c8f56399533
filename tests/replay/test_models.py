"""Models and software of published runs: spellings of one thing, layers of hybrids, stacks by words in their names."""

from __future__ import annotations

import pytest

from meshwright.replay import words
from meshwright.replay.express import express
from meshwright.replay.published import replay
from meshwright.spec.cluster import Precision
from meshwright.spec.model import Attention, FeedForward, LatentAttention, Mixture, ModelSpec, Recurrence
from meshwright.spec.plan import Recompute, ScheduleKind, Sharding
from tests.replay.test_validate import MIXTURE, row

NEMOTRON_H = {
    "model": "nemotron-h-8b",
    "arch": "mamba2-hybrid",
    "layers": "52",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "head_dim": "128",
    "ffn": "21504",
    "vocab": "131072",
    "framework": "Megatron-Core",
    "precision": "bf16",
}


def kinds(model: ModelSpec) -> str:
    """`A` attends, `R` is recurrent, `L` has latents; `f` is a feed-forward and `m` a mixture."""
    letters = {Attention: "A", Recurrence: "R", LatentAttention: "L", FeedForward: "f", Mixture: "m", type(None): ""}
    return " ".join(letters[type(layer.mixer)] + letters[type(layer.transform)] for layer in model.layers)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("GPT-2", "gpt"),
        ("opt", "gpt"),
        ("Llama3", "llama"),
        ("qwen2", "llama"),
        ("Mixtral", "moe"),
        ("llama-moe", "moe"),
        ("deepseek-v3", "moe-mla"),
        ("mT5", "t5"),
        ("encoder-decoder", "t5"),
        ("RoBERTa", "bert"),
        ("nemotron-h", "hybrid-mamba"),
        ("hybrid-mamba2-moe", "hybrid-mamba-moe"),
        ("hybrid-linear-attention-moe", "linear-moe"),
        ("mamba2", "mamba"),
        ("", "gpt"),
        ("qwen3-next", "linear"),
        ("qwen3-next-moe", "linear-moe"),
        ("nemotron3-nano-moe", "hybrid-mamba-moe"),
        ("moe-hybrid", "hybrid-mamba-moe"),
        ("gpt-oss", "moe"),
        ("rwkv", None),
        ("unet", None),
    ],
)
def test_kinds_of_model_in_their_spellings(text: str, kind: str | None) -> None:
    assert words.model_kind(text) == kind


def test_a_decoder_is_gated_or_has_experts_as_its_columns_say() -> None:
    assert words.model_kind("dense", gated=True) == "llama"
    assert words.model_kind("", gated=False) == "gpt"
    assert words.model_kind("qwen3", experts=True) == "moe"
    blank = express(row(arch=""))
    assert "a decoder: the kind of model is not printed" in blank.assumed


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"zero": "ZeRO-2", "pp": "1", "dp": "8"}, Sharding.GRADIENTS),
        ({"zero": "FSDP2", "pp": "1", "dp": "8"}, Sharding.PARAMETERS),
        ({"zero": "distributed optimizer"}, Sharding.OPTIMIZER),
        ({"zero": "ddp"}, Sharding.NONE),
        ({"recompute": "Full"}, Recompute.FULL),
        ({"recompute": "selective (core_attn)"}, Recompute.SELECTIVE),
        ({"recompute": "no"}, Recompute.NONE),
        ({"precision": "BF16-mixed"}, Precision.BF16),
        ({"precision": "float32"}, Precision.FP32),
        ({"schedule": "PipeDream-Flush"}, ScheduleKind.ONE_F_ONE_B),
        ({"schedule": "AFAB"}, ScheduleKind.GPIPE),
        ({"schedule": "1F1B-interleaved", "vpp": "3"}, ScheduleKind.INTERLEAVED),
        ({"schedule": "ZBH1"}, ScheduleKind.ZERO_BUBBLE_H1),
        ({"zero": "1 (distributed optimizer)"}, Sharding.OPTIMIZER),
        ({"zero": "SHARD_GRAD_OP", "pp": "1", "dp": "8"}, Sharding.GRADIENTS),
        ({"recompute": "full/block 4"}, Recompute.FULL),
        ({"recompute": "minimal"}, Recompute.SELECTIVE),
        ({"precision": "bf16-true"}, Precision.BF16),
        ({"precision": "fp8-rowwise", "gpu": "H100"}, Precision.FP8_ROW),
    ],
)
def test_words_of_a_plan_in_their_spellings(changes: dict[str, str], found: object) -> None:
    plan = express(row(**changes)).design.plan
    group = plan.first_group
    assert found in (group.sharding, group.recompute, group.precision, plan.schedule.kind)


@pytest.mark.parametrize(
    ("changes", "software"),
    [
        ({"framework": "HF Trainer", "flash": "yes"}, "torch-plain"),
        ({"framework": "DeepSpeed", "flash": "no"}, "torch-2021"),
        ({"framework": "HF Trainer, DeepSpeed", "flash": "yes"}, "deepspeed"),
        ({"framework": "PyTorch FSDP", "flash": "", "gpu": "V100-32GB"}, "torch-2021"),
        ({"framework": "PyTorch FSDP", "flash": "", "gpu": "A100"}, "torch-plain"),
        ({"framework": "metaseq", "flash": ""}, "megatron-2021"),
        ({"framework": "NeMo-Megatron 22.08", "flash": ""}, "megatron-2022"),
        ({"framework": "NeMo 24.09", "flash": ""}, "nemo"),
        ({"framework": "NeMo 2.0", "flash": ""}, "nemo"),
        ({"framework": "Megatron-LM", "flash": "", "gpu": "H100"}, "megatron-core"),
        ({"framework": "torchtitan", "compile": "yes", "gpu": "H100"}, "torch-2024-compiled"),
        ({"framework": "torchtitan", "compile": "yes", "gpu": "B200"}, "torch-2025-compiled-fused-loss"),
        ({"framework": "MaxText", "flash": "", "gpu": "TPU-v5p", "precision": "bf16"}, "xla"),
        ({"framework": "MaxText", "flash": "", "gpu": "H100-80GB-SXM", "precision": "bf16"}, "xla-gpu"),
        ({"framework": "T5X", "flash": "", "gpu": "TPU-v4", "precision": "bf16"}, "xla-2022"),
        ({"framework": "Alpa", "flash": "", "gpu": "V100"}, "xla-gpu-2023-unfused"),
        ({"framework": "LLM Foundry", "flash": "yes"}, "torch-2023"),
        ({"framework": "Nanotron", "flash": "yes"}, "nanotron"),
        ({"framework": "Primus", "gpu": "MI300X", "precision": "bf16", "flash": ""}, "primus"),
        ({"framework": "AXLearn", "gpu": "TPU-v5p", "precision": "bf16", "flash": ""}, "xla"),
        ({"framework": "in-house", "gpu": "TPU-v5p", "precision": "bf16", "flash": ""}, "xla"),
    ],
)
def test_stacks_are_known_by_words_in_their_names(changes: dict[str, str], software: str) -> None:
    assert express(row(**changes)).design.job.software == software


def test_a_stack_that_nobody_modelled_is_told() -> None:
    parallel = express(row(framework="Sums by Hand"))
    assert parallel.design.job.software == "megatron-2021"
    assert any(told.startswith("Sums by Hand taken to work as Megatron-LM") for told in parallel.assumed)
    alone = express(row(framework="Sums by Hand", tp="1", pp="1", dp="16", flash="yes"))
    assert alone.design.job.software == "torch-plain"
    assert any("plain PyTorch" in told for told in alone.assumed)


@pytest.mark.parametrize("arch", ["mamba2-hybrid", "nemotron-h", "hybrid"])
def test_a_published_hybrid_has_the_layers_of_its_configuration(arch: str) -> None:
    """Nemotron-H 8B: 24 Mamba-2 layers, 24 feed-forwards, 4 of attention (2504.03624, table 1)."""
    found = express(row(**NEMOTRON_H | {"arch": arch}))
    layers = kinds(found.design.model).split()
    assert (layers.count("R"), layers.count("f"), layers.count("A")) == (24, 24, 4)
    assert found.design.model.parameters == pytest.approx(8.1e9, rel=0.01)


def test_nemotron_3_nano_counts_its_published_parameters() -> None:
    """31.6 billion, 3.6 billion of them active (config.json and model card)."""
    sizes = {"layers": "52", "hidden": "2688", "kv_heads": "2", "n_experts": "128", "topk": "6", "expert_ffn": "1856"}
    blank = {"vocab": "", "ffn": "", "gated": "", "tp": "1", "dp": "8"}
    found = express(row(**NEMOTRON_H | sizes | blank | {"model": "nemotron3-nano", "arch": "hybrid-mamba-moe"}))
    assert found.design.model.parameters == pytest.approx(31.6e9, rel=0.002)
    assert found.design.model.active_parameters == pytest.approx(3.6e9, rel=0.01)


def test_layers_of_a_hybrid_are_read_from_a_pattern_or_a_count() -> None:
    small = NEMOTRON_H | {"model": "mine", "layers": "8", "pp": "1", "dp": "8"}
    assert kinds(express(row(**small, extra="pattern=M-M*|M-M-")).design.model) == "R f R A R f R f"
    said = express(row(**small, extra="attention_layers=2; mamba_heads=32 mamba_state=64")).design.model
    assert kinds(said).split().count("A") == 2
    mamba = next(layer.mixer for layer in said.layers if isinstance(layer.mixer, Recurrence))
    assert (mamba.inner, mamba.state) == (2048, 64)
    long = express(row(**small, extra="pattern=M-M*"))
    assert any("pattern of 4 layers" in told for told in long.assumed)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"arch": "linear-attention"}, "Rf Rf Rf Af Rf Rf Rf Af"),
        ({"arch": "hybrid-linear-moe", "extra": "attention 1:1"}, "Rm Am Rm Am Rm Am Rm Am"),
        ({**MIXTURE, "arch": "jamba"}, "Rf Rm Rf Rm Rf Rm Rf Am"),
        ({"arch": "hybrid-kda-mla-moe"}, "Rm Rm Rm Lm Rm Rm Rm Lm"),
        ({"arch": "minimax", "model": "MiniMax-Text-01"}, "Rf Rf Rf Rf Rf Rf Rf Af"),
        ({"arch": "mamba2"}, "R R R R R R R R"),
        ({"arch": "moe", "extra": "MoE every 2 layers"}, "Af Am Af Am Af Am Af Am"),
    ],
)
def test_families_of_hybrids(changes: dict[str, str], layers: str) -> None:
    mixed = MIXTURE if "moe" in changes["arch"] else {}
    found = express(row(**{**mixed, "layers": "8", "pp": "1", "dp": "8", **changes, "arch": changes["arch"]}))
    assert kinds(found.design.model) == layers


def test_qwen3_next_projects_as_its_configuration_says() -> None:
    """linear_num_key_heads 16, linear_num_value_heads 32, both of 128 features, one layer in four attends."""
    changes = {"model": "qwen3-next-80b-a3b", "arch": "hybrid-linear-moe", "layers": "48", "hidden": "2048"}
    sizes = {"n_experts": "512", "topk": "10", "expert_ffn": "512", "n_shared": "1", "head_dim": "256", "kv_heads": "2"}
    model = express(row(**MIXTURE | changes | sizes | {"vocab": "151936"})).design.model
    mamba = model.layers[0].mixer
    assert isinstance(mamba, Recurrence)
    assert mamba.matrix_parameters == 2048 * (16 * 128 * 2 + 32 * 128 * 2 + 2 * 32) + 32 * 128 * 2048
    assert model.parameters == pytest.approx(80e9, rel=0.01)


def test_qwen3_5_has_twice_the_heads_of_values() -> None:
    """config.json of Qwen3.5-397B-A17B: linear_num_value_heads 64, linear_num_key_heads 16."""
    changes = {"model": "Qwen3.5-397B-A17B", "arch": "hybrid-linear-moe", "layers": "60", "hidden": "4096"}
    sizes = {"n_experts": "512", "topk": "10", "expert_ffn": "1024", "head_dim": "256", "kv_heads": "2"}
    model = express(row(**MIXTURE | changes | sizes | {"heads": "32", "vocab": ""})).design.model
    mixer = model.layers[0].mixer
    assert isinstance(mixer, Recurrence)
    assert (mixer.heads, mixer.inner, mixer.groups, mixer.delta) == (64, 8192, 16, True)
    assert model.parameters == pytest.approx(397e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "delta"),
    [
        ({"arch": "hybrid-linear-moe", "model": "kimi-linear-48b"}, True),
        ({"arch": "minimax", "model": "MiniMax-Text-01"}, False),
        ({"arch": "mamba2"}, False),
    ],
)
def test_states_of_lightning_attention_and_mamba_are_not_corrected(changes: dict[str, str], delta: bool) -> None:
    found = express(row(**{**MIXTURE, "layers": "8", "pp": "1", "dp": "8", **changes})).design.model
    mixer = found.layers[0].mixer
    assert isinstance(mixer, Recurrence)
    assert mixer.delta is delta


def test_experts_without_a_width_of_their_own_are_as_wide_as_a_feed_forward() -> None:
    found = express(row(**MIXTURE | {"expert_ffn": "", "ffn": "4096"}))
    mixture = found.design.model.layers[0].transform
    assert isinstance(mixture, Mixture)
    assert mixture.hidden == 4096
    assert "experts as wide as a feed-forward is" in found.assumed
    assert "expert_ffn is not printed" in replay(row(**MIXTURE | {"expert_ffn": "", "ffn": ""})).reason


T5 = {"arch": "t5", "layers": "12", "hidden": "1024", "pp": "1", "dp": "8", "seq": "512"}


@pytest.mark.parametrize(
    "said", [{"seq": "512+128"}, {"seq": "512/128"}, {"extra": "decoder_seq=128"}, {"extra": "tgt len 128"}]
)
def test_a_decoder_has_tokens_of_its_own(said: dict[str, str]) -> None:
    design = express(row(**T5 | said)).design
    assert design.plan.sequence_length == 512
    tokens = {layer.tokens for layer in design.model.layers[12:]} | {design.model.head.tokens}
    assert (design.model.layers[0].tokens, tokens, design.model.embedding.tokens) == (1.0, {0.25}, 1.25)
    across = design.model.layers[13].mixer
    assert isinstance(across, Attention)
    assert across.keys == 4.0
    assert row(**T5 | said, iter_s="", tokens_s_gpu="100").seconds == pytest.approx(64 * 640 / (100 * 16))


def test_a_shorter_decoder_takes_its_share_of_the_step() -> None:
    """Less than a decoder as long as its encoder: less work, less memory, fewer FLOPs."""
    even, short, shortest = (replay(row(**T5 | {"seq": seq})).point for seq in ("512+512", "512+128", "512+1"))
    assert even is not None
    assert short is not None
    assert shortest is not None
    assert shortest.predicted_seconds < short.predicted_seconds < even.predicted_seconds
    assert short.predicted_bytes < even.predicted_bytes
    models = [express(row(**T5 | {"seq": seq})).design.model for seq in ("512+512", "512+128")]
    assert models[0].parameters == models[1].parameters
    whole, part = (model.flops_per_token(512) for model in models)
    layer = models[0].layers[12]
    width = 1024
    own = 12 * (4 + 2 + 8) * width**2 + 51200 * width  # self-attention, queries and output across, feed-forward, head
    scores = 12 * 4 * width * (513 / 2 - 0.25 * 129 / 2 + 0.75 * 512)
    assert layer.mixer is not None
    assert whole - part == pytest.approx(6 * 0.75 * own + 3 * scores)


def test_two_lengths_without_an_encoder_are_refused() -> None:
    assert "several lengths" in replay(row(seq="512+128")).reason


def test_layers_of_stages_are_as_the_row_says() -> None:
    plan = express(row(extra="stage_layers=16+8", gpu="8xV100-32GB + 8xT4")).design.plan
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 17), (17, 26)]
    assert [(s.start, s.stop) for s in express(row(extra="layers per stage: 12, 12")).design.plan.stages] == [
        (0, 13),
        (13, 26),
    ]
    assert "16 + 9 layers are not 24" in replay(row(extra="stage_layers=16+9")).reason


def test_a_batch_follows_from_microbatches_and_ranks() -> None:
    found = express(row(gbs="", mbs="2", ga="8"))
    assert found.design.plan.batch == 64
    assert row(gbs="", mbs="2", ga="8", dp="", iter_s="", tokens_s_gpu="100").seconds == pytest.approx(64 * 2048 / 1600)
    assert "gbs is not printed" in replay(row(gbs="", ga="")).reason


@pytest.mark.parametrize(
    "changes",
    [
        {**MIXTURE, "extra": "moe every 0 layers"},
        {"arch": "linear", "extra": "attention every 0"},
        {"arch": "hybrid", "extra": "attention_layers=0; mamba_heads=0 mamba_state=0"},
        {"arch": "t5", "extra": "decoder_seq=0"},
        {"arch": "hybrid", "extra": "pattern=|||"},
        {"arch": "linear", "heads": "4096", "extra": "0:1"},
        {"gpu": "0xA100 + 0xT4"},
        {"gpu": "+"},
        {"inter_link": "0x200Gb/s + between"},
    ],
)
def test_a_row_of_nonsense_is_predicted_or_has_its_reason(changes: dict[str, str]) -> None:
    found = replay(row(**changes))
    assert bool(found.point) is not bool(found.reason)


def test_heads_of_a_decoder_without_gates_are_as_wide_as_the_row_says() -> None:
    """MaxText's model of 52B parameters has 32 heads of 256 features at a width of 12,288."""
    model = express(row(hidden="12288", heads="32", head_dim="256", gated="no", ffn="49152")).design.model
    mixer = model.layers[0].mixer
    assert isinstance(mixer, Attention)
    assert (mixer.heads, mixer.head_dim) == (32, 256)


@pytest.mark.parametrize("zero", ["2", "fsdp", "ZeRO-3"])
def test_pipelines_gather_and_reduce_once_a_step(zero: str) -> None:
    found = express(row(zero=zero))
    assert found.design.plan.first_group.sharding is Sharding.OPTIMIZER
    assert "parameters gathered and gradients reduced once a step" in found.assumed
