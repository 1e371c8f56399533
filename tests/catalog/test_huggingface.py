from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.catalog.decoders.presets import CONFIGS
from meshwright.catalog.huggingface import model_from_config
from meshwright.catalog.huggingface.families import FAMILIES
from meshwright.catalog.huggingface.folder import open_folder
from meshwright.spec.errors import ConfigError
from meshwright.spec.model import Attention, LatentAttention, Mixture, ModelSpec

HERE = Path(__file__).parent
ORACLE: dict[str, int] = json.loads((HERE / "oracle_parameters.json").read_text())["parameters"]
VARIANTS: list[dict[str, Any]] = json.loads((HERE / "oracle_variants.json").read_text())
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}


def refused(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        model_from_config(config, name="x")
    return [str(problem) for problem in caught.value.problems]


def test_the_oracle_covers_every_published_config() -> None:
    files = {path.name.removesuffix(".config.json").replace("--", "/") for path in CONFIGS.glob("*.config.json")}
    assert files == set(ORACLE)
    assert len(files) == 25


@pytest.mark.parametrize("name", ORACLE)
def test_counts_equal_the_oracle_to_the_last_parameter(name: str) -> None:
    assert catalog.load_model(name).parameters == ORACLE[name]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant["config"]["model_type"])
def test_small_variants_of_every_family_count_as_the_oracle_does(variant: dict[str, Any]) -> None:
    assert model_from_config(variant["config"], name="x").parameters == variant["parameters"]


def test_every_family_has_a_variant_or_a_published_config() -> None:
    published = {json.loads(path.read_text())["model_type"] for path in CONFIGS.glob("*.config.json")}
    assert published | {variant["config"]["model_type"] for variant in VARIANTS} == set(FAMILIES)


def test_a_vision_tower_is_counted_when_the_config_has_one() -> None:
    config = json.loads(next(CONFIGS.glob("*Llama-4-Scout*")).read_text())
    whole = model_from_config({**config, "vision_config": {}}, name="x")
    text = model_from_config(config, name="x")
    assert text.towers == ()
    assert (whole.parameters, text.parameters) == (108225039360, 107769861120)


def attention(model: ModelSpec, layer: int) -> Attention:
    mixer = model.layers[layer].mixer
    assert isinstance(mixer, Attention)
    return mixer


def test_windows_chunks_and_positions_are_read_layer_by_layer() -> None:
    oss = catalog.load_model("gpt-oss-20b")
    assert [attention(oss, layer).window for layer in range(4)] == [128, None, 128, None]
    assert attention(oss, 0).sinks
    olmo = catalog.load_model("olmo-3.1-32b")
    assert [attention(olmo, layer).window for layer in range(4)] == [4096, 4096, 4096, None]
    full, sliding = attention(olmo, 3).rotary, attention(olmo, 0).rotary
    assert full is not None
    assert full.scaling is not None
    assert full.scaling.kind == "yarn"
    assert (full.scaling.factor, full.scaling.low_frequency, full.scaling.high_frequency) == (8.0, 1.0, 32.0)
    assert sliding is not None
    assert sliding.scaling is None
    scout = catalog.load_model("llama-4-scout")
    assert [attention(scout, layer).chunk for layer in range(4)] == [8192, 8192, 8192, None]
    assert [attention(scout, layer).rotary is None for layer in range(4)] == [False, False, False, True]
    gemma = catalog.load_model("gemma-4-26b-a4b")
    assert (attention(gemma, 5).head_dim, attention(gemma, 5).kv_heads, attention(gemma, 5).shared_key_value) == (
        512,
        2,
        True,
    )
    assert attention(gemma, 5).rotary != attention(gemma, 4).rotary


def test_mixtures_say_how_many_experts_a_token_meets() -> None:
    deepseek = catalog.load_model("deepseek-v3")
    assert isinstance(deepseek.layers[0].mixer, LatentAttention)
    assert [isinstance(layer.transform, Mixture) for layer in deepseek.layers] == [False] * 3 + [True] * 58
    mixture = deepseek.layers[3].transform
    assert isinstance(mixture, Mixture)
    assert (mixture.experts, mixture.top_k, mixture.hidden) == (256, 8, 2048)
    assert deepseek.active_parameters < 0.06 * deepseek.parameters


def test_what_a_spec_leaves_out_is_said() -> None:
    assert "not carried" in catalog.load_model("deepseek-v3").source
    assert "not carried" not in catalog.load_model("llama-3.1-8b").source


def test_an_unknown_family_names_those_that_are_known() -> None:
    (told,) = refused({"model_type": "gpt_oss2"})
    assert "did you mean 'gpt_oss'?" in told
    assert "mixtral" in told
    assert "is missing" in refused({})[0]


def test_everything_wrong_is_told_once_and_at_once() -> None:
    told = refused({**SMALL, "hidden_size": -1, "vocab_size": 3.5, "hidden_act": "foo", "rope_scaling": 3})
    keys = [line.partition(":")[0] for line in told]
    assert sorted(keys) == ["hidden_act", "hidden_size", "rope_scaling", "vocab_size"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 heads"),
        ({"head_dim": 10**400}, "is more than 1000000000000"),
        ({"num_attention_heads": 10**24}, "num_attention_heads: 1000000000000000000000000 is more than 1000000000000"),
        ({"num_attention_heads": 6}, "num_attention_heads: 6 does not divide hidden_size 64"),
        ({"num_hidden_layers": 4097}, "num_hidden_layers: 4097 is more than 4096"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        ({"rope_theta": 0}, "rope_theta: expected a number above 0"),
        ({"rope_theta": 10**400}, "rope_theta: expected a number above 0"),
        ({"intermediate_size": None}, "intermediate_size: is missing"),
        ({"model_type": "qwen3"}, "head_dim: is missing"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads: is missing"),
        ({"model_type": "olmo3", "layer_types": ["full_attention"]}, "layer_types: expected a list of 2 values"),
        ({"model_type": "olmo3", "layer_types": ["full_attention", "odd"]}, "layer_types: unknown odd"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok: 3 is more than the 2 experts",
        ),
    ],
)
def test_an_odd_key_is_named(change: dict[str, Any], expected: str) -> None:
    assert expected in "\n".join(refused({**SMALL, **change}))


@pytest.mark.parametrize("key", ["audio_config", "hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_parts_of_gemma4_that_are_not_supported_are_refused(key: str) -> None:
    config = next(entry["config"] for entry in VARIANTS if entry["config"]["model_type"] == "gemma4")
    if key == "audio_config":
        changed = {**config, key: {"hidden_size": 8}}
    else:
        changed = {**config, "text_config": {**config["text_config"], key: 2}}
    assert "not supported" in "\n".join(refused(changed))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=80)
@given(data=st.data())
def test_any_config_is_read_or_refused_in_words(data: st.DataObject) -> None:
    config = dict(data.draw(st.sampled_from(VARIANTS))["config"])
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        if key != "model_type":
            config[key] = data.draw(VALUES)
    try:
        parameters = model_from_config(config, name="x").parameters
    except ConfigError as error:
        parameters = len(error.problems)
    assert parameters > 0


def test_more_experts_than_a_checkpoint_can_name_are_refused(tmp_path: Path) -> None:
    """A vocabulary in the place of the number of experts took a reader minutes and all memory."""
    text = json.loads((CONFIGS / "Qwen--Qwen3-30B-A3B.config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, "num_experts": 151936}))
    with pytest.raises(ConfigError, match="experts in all layers are more than a plan is made for"):
        catalog.load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="experts in all layers are more than a plan is made for"):
        open_folder(tmp_path)
