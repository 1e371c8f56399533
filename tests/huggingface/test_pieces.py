"""Tables cover every parameter and every stored tensor, each element once, both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.catalog.decoders.presets import CONFIGS
from meshwright.catalog.huggingface import model_from_config
from meshwright.catalog.huggingface.tensors import Table, tensors
from meshwright.nn import Decoder
from meshwright.spec.errors import ConfigError
from meshwright.spec.model import language_model
from meshwright.train.huggingface.pieces import make_stored, read_box
from tests.huggingface.cases import configs

CASES = configs()
FILES = sorted(CONFIGS.glob("*.config.json"))


def title(file: Any) -> str:
    return str(file.name).removesuffix(".config.json")


@pytest.mark.parametrize("file", FILES, ids=title)
def test_every_parameter_of_a_published_model_has_its_place(file: Any) -> None:
    """The first layers, and the last: a table of all experts of all layers says the same again."""
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "quantization_config"}
    model = language_model(model_from_config(config, name="x"))
    model = replace(model, layers=(*model.layers[:4], model.layers[-1]))
    with torch.device("meta"):
        decoder = Decoder(model)
    table = tensors(config, model)
    state = {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
    assert dict(table.ours) == {name: tuple(x.shape) for name, x in state.items()}
    for of, shapes in ((table.of_ours, table.ours), (table.of_theirs, table.theirs)):
        for name, pieces in of.items():
            counted = sum(torch.Size(piece.shape).numel() for piece in pieces)
            assert counted == torch.Size(shapes[name]).numel(), name


@pytest.mark.parametrize("case", CASES)
def test_every_element_goes_there_and_comes_back(case: str) -> None:
    table = tensors(CASES[case], language_model(model_from_config(CASES[case], name="x")))
    table = replace(table, pieces=tuple(replace(piece, offset=0.0) for piece in table.pieces))
    count, stored = 0, {}
    for name, shape in table.theirs.items():
        size = torch.Size(shape).numel()
        stored[name] = torch.arange(count, count + size, dtype=torch.float64).view(shape)
        count += size
    ours = {name: whole(name, table, stored) for name in table.ours}
    numbers = torch.cat([x.flatten() for x in ours.values()]).sort().values
    assert torch.equal(numbers, torch.arange(count, dtype=torch.float64))
    for name, expected in stored.items():
        assert torch.equal(make_stored(name, dtype=torch.float64, table=table, parameter=ours.__getitem__), expected)


@pytest.mark.parametrize("case", ["gpt_oss", "mixtral", "phi3", "gpt2", "deepseek_v3", "gemma2", "gemma4"])
def test_any_box_is_that_part_of_the_whole(case: str) -> None:
    table = tensors(CASES[case], language_model(model_from_config(CASES[case], name="x")))
    draw = torch.Generator().manual_seed(0)
    stored = {name: torch.randn(shape, generator=draw) for name, shape in table.theirs.items()}
    for name, shape in table.ours.items():
        expected = whole(name, table, stored)
        for dim, size in enumerate(shape):
            start = [0] * len(shape)
            start[dim] = size // 3
            box = expected.narrow(dim, start[dim], size - size // 3 - size // 4)
            found = torch.empty_like(box, dtype=torch.float64)
            read_box(found, name, start=start, table=table, stored=stored.__getitem__)
            assert torch.equal(found, box)


def whole(name: str, table: Table, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    made = torch.empty(table.ours[name], dtype=torch.float64)
    read_box(made, name, start=(0,) * made.dim(), table=table, stored=stored.__getitem__)
    return made


def test_scales_that_are_stored_less_one_are_added_and_taken_away() -> None:
    table = tensors(CASES["gemma2"], model_from_config(CASES["gemma2"], name="x"))
    stored = {name: torch.full(shape, 0.25) for name, shape in table.theirs.items()}
    norm, matrix = "layers.1.mixer_post_norm.weight", "layers.1.mixer.query.weight"
    assert whole(norm, table, stored).unique().tolist() == [1.25]
    assert whole(matrix, table, stored).unique().tolist() == [0.25]
    made = make_stored(
        "model.norm.weight", dtype=torch.float32, table=table, parameter=lambda _: torch.full((16,), 1.5)
    )
    assert made.unique().tolist() == [0.5]


@pytest.mark.parametrize(
    ("case", "change", "expected"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob: False is arithmetic"),
        ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob: is missing"),
        ("gpt_oss", {"swiglu_limit": 9.0}, "swiglu_limit: 9.0 is arithmetic"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True is arithmetic"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is arithmetic"),
        ("llama", {"rope_theta": None, "quantization_config": {"quant_method": "fp8"}}, "are quantised (fp8)"),
        ("phi3", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "stretched by 'longrope' are not built"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: 'all' is arithmetic"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True is arithmetic"),
    ],
)
def test_a_config_whose_arithmetic_is_not_ours_is_refused(case: str, change: dict[str, Any], expected: str) -> None:
    config = {**CASES[case], **change}
    with pytest.raises(ConfigError) as caught:
        tensors(config, model_from_config(config, name="x"))
    assert expected in "\n".join(str(problem) for problem in caught.value.problems)


def test_the_base_of_rotary_frequencies_must_be_said() -> None:
    config = {key: value for key, value in CASES["mixtral"].items() if key != "rope_theta"}
    with pytest.raises(ConfigError, match="rope_theta: is missing"):
        tensors(config, model_from_config(config, name="x"))
