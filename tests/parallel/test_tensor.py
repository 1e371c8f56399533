"""The table of tensor parallel: what is divided, and whose gradients are summands."""

from __future__ import annotations

import pytest
import torch

from meshwright.nn import Decoder
from meshwright.parallel.tensor import divided_dim, has_partial_gradient, indivisible
from meshwright.spec.blocks import Block
from meshwright.spec.model import ModelSpec
from tests.support import models

DIVIDED = {
    "embedding.tokens.weight": 0,
    "head.output.weight": 0,
    "layers.0.mixer.query.weight": 0,
    "layers.0.mixer.query.bias": 0,
    "layers.0.mixer.output.weight": 1,
    "layers.0.transform.gate.weight": 0,
    "layers.0.transform.down.weight": 1,
    "layers.0.transform.experts.gate": 1,
    "layers.0.transform.experts.up_bias": 1,
    "layers.0.transform.experts.down": 2,
    "layers.0.transform.shared.up.weight": 0,
    "layers.0.transform.shared.down.weight": 1,
}
WHOLE = (
    "embedding.positions.weight",
    "head.norm.weight",
    "layers.0.mixer_norm.weight",
    "layers.0.mixer.output.bias",
    "layers.0.transform.router.weight",
    "layers.0.transform.shared_gate.weight",
    "layers.0.transform.experts.down_bias",
    "layers.0.mixer.kv_down.weight",
    "layers.0.mixer.key_norm.weight",
)
LAYER = models.all_models()["tiny"].layers[0]


def block_of(spec: ModelSpec, name: str) -> Block:
    head, index = spec.blocks[-1], name.split(".")[1]
    return spec.layers[int(index)] if name.startswith("layers.") else head


@pytest.mark.parametrize(("name", "dim"), DIVIDED.items())
def test_what_is_divided_and_along_which_dim(name: str, dim: int) -> None:
    assert divided_dim(name, block=LAYER) == dim
    assert not has_partial_gradient(name, block=LAYER, sequence=True)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_held_whole(name: str) -> None:
    assert divided_dim(name, block=LAYER) is None
    inside = ".mixer." in name or ".transform." in name
    assert has_partial_gradient(name, block=LAYER, sequence=False) == inside
    assert has_partial_gradient(name, block=LAYER, sequence=True)


def test_a_norm_over_all_heads_is_divided_with_them() -> None:
    full = models.all_models()["full_norm"].layers[0]
    assert divided_dim("layers.0.mixer.query_norm.weight", block=full) == 0


@pytest.mark.parametrize("kind", models.all_models())
def test_every_divided_dim_divides_by_two(kind: str) -> None:
    spec = models.all_models()[kind]
    with torch.device("meta"):
        decoder = Decoder(spec)
    for name, parameter in decoder.named_parameters():
        dim = divided_dim(name, block=block_of(spec, name))
        assert dim is None or parameter.shape[dim] % 2 == 0, name


def test_dimensions_that_do_not_divide_are_named() -> None:
    found = [problem.what for problem in indivisible(models.model(), tensor=8)]
    assert found == ["heads of 4 do not divide by tensor 8"] * 4
    told = [problem.what for problem in indivisible(models.model(), tensor=3)]
    assert "key-value heads of 2 do not divide by tensor 3" in told
    assert indivisible(models.model(), tensor=2) == indivisible(models.model(), tensor=4) == ()
