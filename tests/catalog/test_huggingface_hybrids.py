"""Configs of hybrids, state spaces and encoders: published shapes by their counts, and what is refused of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright import catalog, search
from meshwright.catalog.huggingface import model_from_config
from meshwright.catalog.huggingface.families import FAMILIES, REFUSED
from meshwright.export.oddities import oddities
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Attention, FeedForward, Mixture, ModelSpec, Recurrence
from meshwright.spec.tensors import tensors
from tests.support.sampled import sampled

PAGES = Path(__file__).parents[2] / "docs"
VARIANTS = json.loads((Path(__file__).parent / "oracle_variants.json").read_text())
STATE_SPACES = ("mamba2", "nemotron_h", "bamba", "falcon_h1", "granitemoehybrid", "qwen3_next")
HYBRIDS = (*STATE_SPACES, "t5", "mt5", "bert", "roberta")

# config.json of state-spaces' mamba2-2.7b as transformers converts it, nvidia/Nemotron-H-8B-Base-8K,
# ibm-ai-platform/Bamba-9B, tiiuae/Falcon-H1-0.5B-Base, ibm-granite/granite-4.0-h-small, Qwen/Qwen3-Next-80B-A3B,
# google-t5/t5-11b, google/flan-t5-small, google/mt5-xxl, google-bert/bert-large-uncased, FacebookAI/roberta-large.
# Counts are those of the models that transformers 5.24 builds of them; the heads of flan-t5 and mt5, which it ties,
# are apart in their checkpoints and so counted apart.
MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 2560,
    "num_heads": 80,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "num_hidden_layers": 64,
    "vocab_size": 50288,
    "tie_word_embeddings": True,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_hidden_layers": 52,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "vocab_size": 131072,
}
BAMBA = {
    "model_type": "bamba",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
}
FALCON = {
    "model_type": "falcon_h1",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32784,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 100352,
    "layer_types": ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "tie_word_embeddings": True,
}
QWEN = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
T5 = {"model_type": "t5", "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128}
FLAN = {"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
MT5 = {"model_type": "mt5", "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
ROBERTA = {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
PUBLISHED = {
    "mamba2-2.7b": (MAMBA2, 2_702_599_680),
    "nemotron-h-8b": (NEMOTRON, 8_100_852_736),
    "bamba-9b": (BAMBA, 9_780_235_392),
    "falcon-h1-0.5b": (FALCON, 521_411_104),
    "granite-4.0-h-small": (GRANITE, 32_207_337_984),
    "qwen3-next-80b-a3b": (QWEN, 79_674_391_296),
    "t5-11b": ({**T5, "vocab_size": 32128}, 11_307_321_344),
    "flan-t5-small": ({**FLAN, **GATED, "vocab_size": 32128}, 76_961_152),
    "mt5-xxl": ({**MT5, **GATED, "vocab_size": 250112}, 12_921_057_280),
    "bert-large": ({**BERT, "model_type": "bert", "vocab_size": 30522}, 335_174_458),
    "roberta-large": ({**BERT, **ROBERTA}, 355_412_057),
}


def small(kind: str) -> dict[str, Any]:
    return next(entry["config"] for entry in VARIANTS if entry["config"]["model_type"] == kind)


def read(config: dict[str, Any]) -> ModelSpec:
    return model_from_config(config, name="x")


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(config)
    return "\n".join(str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_count_as_published(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert read(config).parameters == parameters


def test_three_of_eighty_billion_are_active() -> None:
    assert 3.8e9 < read(QWEN).active_parameters < 3.9e9


@pytest.mark.parametrize("kind", HYBRIDS)
def test_the_tensors_of_every_family_are_its_parameters(kind: str) -> None:
    model = read(small(kind))
    for layer in dict.fromkeys(model.layers):
        told = sum(tensor.size for tensor in tensors(layer))
        assert told == layer.parameters


def test_a_pattern_of_letters_and_one_of_words_are_one_model() -> None:
    words = ["linear_attention", "moe", "mamba", "full_attention", "mlp", "moe"]
    config = small("nemotron_h")
    said = {key: value for key, value in config.items() if key != "hybrid_override_pattern"}
    assert config["hybrid_override_pattern"] == "MEM*-E"
    assert read({**said, "layers_block_type": words}) == read(config)


def test_layers_of_nemotron_have_one_part_each() -> None:
    layers = read(small("nemotron_h")).layers
    kinds = [type(layer.mixer or layer.transform) for layer in layers]
    assert kinds == [Recurrence, Mixture, Recurrence, Attention, FeedForward, Mixture]
    attention = layers[3].mixer
    assert isinstance(attention, Attention)
    assert attention.rotary is None


def test_every_fourth_layer_of_qwen3_next_attends_with_a_gate() -> None:
    layers = read(QWEN).layers
    assert [isinstance(layer.mixer, Attention) for layer in layers[:4]] == [False, False, False, True]
    full, linear = layers[3].mixer, layers[0].mixer
    assert isinstance(full, Attention)
    assert full.gated
    assert full.rotary is not None
    assert full.rotary.dims == 64
    assert isinstance(linear, Recurrence)
    assert linear.delta


def test_an_encoder_sees_all_and_its_decoder_what_it_gave() -> None:
    model = read(small("t5"))
    mixers = [layer.mixer for layer in model.layers]
    assert [isinstance(mixer, Attention) and mixer.causal for mixer in mixers] == [False] * 2 + [True, False] * 3
    assert model.embedding.tokens == 2.0
    assert all(isinstance(layer.mixer, Attention) and not layer.mixer.causal for layer in read(small("bert")).layers)


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("mamba2", {"use_bias": True}, "use_bias: True is not supported; only False is read"),
        ("mamba2", {"use_conv_bias": False}, "use_conv_bias: False is not supported"),
        ("mamba2", {"num_heads": 7}, "num_heads: 7 heads of 16 are not the width 64 times expand"),
        ("nemotron_h", {"hybrid_override_pattern": "MXM*-E"}, "hybrid_override_pattern: unknown X"),
        ("nemotron_h", {"hybrid_override_pattern": None}, "hybrid_override_pattern: is missing"),
        ("nemotron_h", {"hybrid_override_pattern": "MEM"}, "6 is not the 3 layers of hybrid_override_pattern"),
        ("nemotron_h", {"moe_latent_size": 32}, "moe_latent_size: is not supported"),
        ("bamba", {"attn_layer_indices": [9]}, "attn_layer_indices: names other layers than the 4 there are"),
        ("bamba", {"mamba_proj_bias": True}, "mamba_proj_bias: True is not supported"),
        ("falcon_h1", {"mamba_n_heads": 7}, "mamba_n_heads: 7 heads of 16 are not the 96 features inside"),
        ("granitemoehybrid", {"layer_types": ["mamba", "mamba", "odd", "mamba"]}, "layer_types: unknown odd"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi'"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "3 does not divide 4 heads of values"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "layer_types: unknown sliding_attention"),
        ("t5", {"feed_forward_proj": "gated-odd"}, "feed_forward_proj: 'gated-odd' is unknown"),
        ("mt5", {"tie_word_embeddings": None}, "tie_word_embeddings: is missing"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder: True is not supported"),
    ],
)
def test_what_no_block_says_is_refused_by_name(kind: str, change: dict[str, Any], expected: str) -> None:
    assert expected in refused({**small(kind), **change})


@pytest.mark.parametrize("kind", REFUSED)
def test_families_of_other_layers_are_refused_with_the_reason(kind: str) -> None:
    told = refused({"model_type": kind})
    assert REFUSED[kind] in told
    assert "did you mean" not in told


@pytest.mark.parametrize("kind", sampled(HYBRIDS, quick=4))
def test_every_hybrid_is_planned_and_said_not_to_be_trained_here(kind: str) -> None:
    job = JobSpec(sequence_length=128, batch_tokens=8 * 128)
    decision = search.design(read(small(kind)), catalog.load_cluster("2xH100"), job, top=1)
    assert decision.report.step_seconds > 0.0
    (problem,) = decision.predicts_only
    assert "runtime-layers" in str(problem)
    assert "can be predicted and not trained yet" in str(problem)


@pytest.mark.parametrize("kind", ["bert", "t5", "qwen3_next"])
def test_other_trainers_are_not_said_to_have_words_for_them(kind: str) -> None:
    named = {"bert": "attention that sees later tokens", "t5": "attention that sees later tokens"}
    assert named.get(kind, "gates on what attention gives") in oddities(read(small(kind)))


def test_the_page_of_models_names_every_family() -> None:
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \|", (PAGES / "models.md").read_text(), re.MULTILINE)
    assert sorted(name for row in rows for name in row.split(", ")) == sorted(FAMILIES)


def test_the_page_of_models_names_what_is_refused() -> None:
    text = (PAGES / "models.md").read_text()
    assert all(f"`{kind}`" in text for kind in REFUSED)
