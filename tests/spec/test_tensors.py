"""The parameters of a block by name: those of its module, divided as the layout divides them."""

from __future__ import annotations

import pytest
import torch

from meshwright import catalog
from meshwright.nn import Decoder
from meshwright.parallel.tensor import divided_dim
from meshwright.spec.model import ModelSpec
from meshwright.spec.tensors import prefix, tensors
from tests.support.models import all_models, factored

MODELS = {**all_models(), **{f"{name} factored": factored(model) for name, model in all_models().items()}}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_tensors_are_those_of_the_modules(model: ModelSpec) -> None:
    with torch.device("meta"):
        built = {name: tuple(value.shape) for name, value in Decoder(model).named_parameters()}
    told = {}
    for index, block in enumerate(model.blocks):
        for entry in tensors(block):
            name = f"{prefix(block, index)}{entry.name}"
            told[name] = entry.shape
            assert entry.divided == divided_dim(name, block=block), name
            assert entry.grid == (".experts." in name)
    assert told == built
    if not any(layer.ranks for layer in model.layers):
        assert list(told) == list(built)


@pytest.mark.parametrize("entry", catalog.models(), ids=lambda entry: entry.name)
def test_their_sizes_sum_to_the_parameters_of_every_block(entry: catalog.Entry) -> None:
    for block in set(catalog.load_model(entry.name).blocks):
        assert sum(tensor.size for tensor in tensors(block)) == block.parameters
