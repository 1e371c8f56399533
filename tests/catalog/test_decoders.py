from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.catalog.decoders.presets import by_spelling, presets
from meshwright.catalog.decoders.shapes import GptStyle, LlamaStyle, nearest_divisor
from meshwright.catalog.model_ranges import model_problems
from meshwright.catalog.names import find, normal
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.model import Attention, FeedForward, NormKind


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-1.7b", 1.7),
        ("gpt-3.6b", 3.6),
        ("gpt-7.5b", 7.5),
        ("gpt-18b", 18.4),
        ("gpt-39b", 39.1),
        ("gpt-76b", 76.1),
        ("gpt-145b", 145.6),
        ("gpt-310b", 310.1),
        ("gpt-530b", 529.6),
        ("gpt-1t", 1008.0),
    ],
)
def test_table_1_of_megatron_is_met(name: str, billions: float) -> None:
    """2104.04473 prints these counts, to one place."""
    assert catalog.load_model(name).parameters / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-xl", 1557611200),
        ("gpt2-medium", 354823168),
        ("llama-2-7b", 6738415616),
        ("llama-2-70b", 68976648192),
        ("llama-3-8b", 8030261248),
        ("llama-3.2-3b", 3212749824),
        ("mpt-7b", 6658859008),
    ],
)
def test_public_counts_are_met(name: str, parameters: int) -> None:
    assert catalog.load_model(name).parameters == parameters


@pytest.mark.parametrize(
    "spelling",
    [
        "llama-3.1-405b",
        "Llama-3.1-405B",
        "llama3.1-405b",
        "meta-llama/Llama-3.1-405B",
        "meta-llama/Meta-Llama-3.1-405B",
        "LLAMA_3.1_405B",
        "Llama-3.1-405B-Instruct",
    ],
)
def test_a_model_is_found_however_it_is_spelled(spelling: str) -> None:
    assert catalog.load_model(spelling).name == "llama-3.1-405b"


def test_every_preset_is_found_by_its_own_name_and_owner() -> None:
    for preset in presets():
        assert find(preset.name, by_spelling()) is preset
        assert all(find(alias, by_spelling()) is preset for alias in preset.aliases)
    assert len({normal(preset.name) for preset in presets()}) == len(presets())


def test_the_list_has_a_line_for_every_preset() -> None:
    entries = {entry.name: entry.description for entry in catalog.models()}
    assert len(entries) == len(presets())
    assert entries["llama-3.1-8b"] == "8.03 B parameters, 32 layers, width 4,096, vocabulary 128,256"
    assert "(12.9 B active)" in entries["mixtral-8x7b"]


def test_every_preset_says_where_it_is_from() -> None:
    assert [preset.name for preset in presets() if not preset.build().source] == []


@pytest.mark.parametrize(("name", "expected"), [("llama-3.1-405", "'llama-3.1-405b'"), ("gpt-1tt", "'gpt-1t'")])
def test_an_unknown_model_brings_the_nearest(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean .*{expected}"):
        catalog.load_model(name)


@pytest.mark.parametrize("name", ["", " ", "zzzzzz", "z" * 5000, "z\0z"])
def test_a_name_like_no_other_says_where_to_look(name: str) -> None:
    with pytest.raises(ConfigError, match="meshwright models"):
        catalog.load_model(name)


def test_small_models_are_llama_shaped_in_steps_of_64() -> None:
    sizes = [catalog.load_model(name) for name in ("tiny", "llama-2m", "llama-5m", "llama-11m", "llama-26m")]
    counts = [model.parameters for model in sizes]
    assert counts == pytest.approx([0.16e6, 2e6, 5e6, 11e6, 26e6], rel=0.1)
    for model in sizes:
        mixer, transform = model.layers[0].mixer, model.layers[0].transform
        assert isinstance(mixer, Attention)
        assert isinstance(transform, FeedForward)
        assert (model.width % 64, transform.hidden % 64) == (0, 0)
        assert mixer.kv_heads < mixer.heads
        assert mixer.rotary is not None
        assert transform.gated


def test_the_vocabulary_may_be_replaced() -> None:
    small, large = catalog.load_model("llama-2m"), catalog.load_model("llama-2m", vocab=8192)
    assert (small.vocab, large.vocab, large.head.vocab) == (4096, 8192, 8192)
    assert large.parameters - small.parameters == 4096 * small.width
    with pytest.raises(ConfigError, match="vocabulary of 0"):
        catalog.load_model("tiny", vocab=0)


def test_a_prefix_mask_is_set_by_its_share(tmp_path: Path) -> None:
    """In the short forms; layers of one model agree on it."""
    whole = 'kind = "llama"\nlayers = 2\nwidth = 64\nheads = 4\nhidden = 96\nvocab = 101\n'
    (tmp_path / "model.toml").write_text(whole + "prefix = 0.25\n")
    model = catalog.load_model(str(tmp_path / "model.toml"))
    (tmp_path / "model.toml").write_text(whole)
    assert model.prefix == 0.25
    assert replace(model.causal(), source="") == replace(catalog.load_model(str(tmp_path / "model.toml")), source="")
    layer = model.layers[0]
    assert isinstance(layer.mixer, Attention)
    other = replace(layer, mixer=replace(layer.mixer, prefix=0.5))
    told = [str(problem) for problem in model_problems(replace(model, layers=(layer, other)))]
    assert told == [
        "layers: prompts that fill 0.25 of a sequence in one layer and 0.5 in another; "
        "give every layer one prefix, or 0 where it is causal"
    ]


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 101,
    }
    folder = tmp_path / "My-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert catalog.load_model(folder) == catalog.load_model(str(folder / "config.json"))
    assert catalog.load_model(folder).name == "my-llama"


def test_a_problem_in_a_config_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{\n "model_type": "llama",\n "hidden_size": "wide"\n}')
    with pytest.raises(ConfigError) as caught:
        catalog.load_model(file)
    assert f"{file}:3 hidden_size: expected a whole number from 1, got 'wide'" in str(caught.value)
    assert f"{file}:1 vocab_size: is missing" in str(caught.value)


def test_a_saved_model_is_read_back_equal(tmp_path: Path) -> None:
    for name in ("tiny", "deepseek-v3", "gpt2"):
        catalog.save(catalog.load_model(name), tmp_path / f"{name}.json")
        assert catalog.load_model(tmp_path / f"{name}.json") == catalog.load_model(name)


def test_a_short_form_is_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('kind = "llama"\nlayers = 2\nwidth = 64\nheads = 4\nhidden = 128\nvocab = "1Ki"\n')
    model = catalog.load_model(file)
    assert (model.name, len(model.layers), model.width, model.vocab) == ("mine", 2, 64, 1024)


def told(file: Path, text: str) -> Sequence[Problem]:
    """What is wrong with `text` as a file of a model."""
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        catalog.load_model(file)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('kind = "llma"\n', ":1 kind: kind 'llma' is unknown; did you mean 'llama'?"),
        ('kind = "gpt"\nlayers = 2\nwidth = 64\nheads = 5\n', ":4 heads: width 64 is not a multiple of heads 5"),
        ('kind = "gpt"\nlayers = 2\nwidth = 64\nhead = 4\n', ":4 head: unknown key; did you mean 'heads'?"),
        ("layers = 2\n", "is not a model"),
    ],
)
def test_a_bad_short_form_is_told_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert any(expected in str(problem) for problem in told(tmp_path / "bad.toml", text))


HUGGING_FACE = """kind = "llama"
num_hidden_layers = 2
hidden_size = 64
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 96
vocab_size = 101
rms_norm_eps = 1e-6
rope_theta = 5e5
max_position_embeddings = 128
tie_word_embeddings = true
"""
MEGATRON = """kind = "gpt"
num-layers = 2
hidden_size = 64
num_attention_heads = 4
num_query_groups = 2
ffn_hidden_size = 96
kv_channels = 16
seq_length = 128
add_bias_linear = true
rotary_percent = 0.5
"""


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (HUGGING_FACE, "layers width heads kv_heads hidden vocab eps theta max_positions tied"),
        (MEGATRON, "layers width heads kv_heads hidden head_dim positions bias rotary_fraction"),
        ('kind = "llama"\nlayers = 2\nwidth = 64\nheads = 4\nvocab = 101\nffn = 96\n', "hidden"),
    ],
)
def test_words_of_other_trainers_are_answered_with_the_key(tmp_path: Path, text: str, keys: str) -> None:
    fixes = [problem.fix.partition(",")[0] for problem in told(tmp_path / "mine.toml", text)]
    assert fixes == [f"did you mean {key!r}" for key in keys.split()]


def test_a_short_form_tells_what_is_missing_and_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = 'kind = "llama"\nlayers = 2\nnum_layers = 2\nheads = 4\nhidden = 64\nnum_experts = 8\nscaling = 4'
    assert [str(problem).removeprefix(f"{file}:") for problem in told(file, text)] == [
        "3 num_layers: unknown key; leave it out: 'layers' is the number of layers",
        "6 num_experts: unknown key; experts are in a Hugging Face config.json, or in a file in full: "
        "docs/model_file.md",
        "7 scaling: expected a table, got 4; give its keys, such as scaling.kind, scaling.factor, "
        "scaling.low_frequency, scaling.high_frequency",
        "1: 'width' is missing; give the hidden size, elsewhere hidden_size",
        "1: 'vocab' is missing; give the number of tokens in the vocabulary, elsewhere vocab_size",
    ]


def test_a_missing_file_brings_near_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no such file; did you mean 'config\.json'"):
        catalog.load_model(tmp_path / "confg.json")


def test_impossible_shapes_are_refused_whole() -> None:
    shape = LlamaStyle(name="x", layers=0, width=64, heads=4, hidden=-1, vocab=10)
    with pytest.raises(ConfigError) as caught:
        shape.build()
    assert [problem.where for problem in caught.value.problems] == ["layers", "hidden"]
    with pytest.raises(ConfigError, match="kv_heads = 4"):
        LlamaStyle(name="x", layers=1, width=64, heads=8, kv_heads=5, hidden=8, vocab=10).build()


def test_gpt_shapes_have_layer_norms_biases_and_learned_positions() -> None:
    model = GptStyle(name="x", layers=1, width=8, heads=2, vocab=11, positions=5).build()
    norm = model.layers[0].mixer.norm if model.layers[0].mixer else None
    assert norm is not None
    assert norm.kind is NormKind.LAYER
    # embedding, positions; four norms' scales and biases in the layer and two in the head; 12 h^2 + 9 h of the layer.
    assert model.parameters == 11 * 8 + 5 * 8 + 6 * 8 + 12 * 64 + 9 * 8


@settings(max_examples=60)
@given(number=st.integers(1, 4000), near=st.integers(1, 4000))
def test_the_nearest_divisor_divides_and_none_is_nearer(number: int, near: int) -> None:
    found = nearest_divisor(number, near)
    assert number % found == 0
    nearer = range(near - abs(found - near) + 1, near + abs(found - near))
    assert not any(candidate > 0 and number % candidate == 0 for candidate in nearer)
