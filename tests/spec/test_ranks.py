"""Models whose matrices are products of two thin ones: what they count, and which ranks there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import catalog
from meshwright.catalog.model_ranges import checked_model
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError
from meshwright.spec.model import MatrixRank, ModelSpec
from meshwright.spec.tensors import tensors
from tests.support.models import all_models, factored


@pytest.mark.parametrize("model", all_models().values(), ids=all_models())
def test_tensors_of_a_factored_block_are_its_parameters(model: ModelSpec) -> None:
    low = factored(model)
    for block, whole in zip(low.layers, model.layers, strict=True):
        assert sum(tensor.size for tensor in tensors(block)) == block.parameters
        assert whole.matrix_parameters - block.matrix_parameters == whole.parameters - block.parameters
        assert whole.active_parameters - block.active_parameters == whole.parameters - block.parameters
    assert codec.decode(ModelSpec, codec.encode(low)) == low
    assert low.dense() == model
    assert len(set(map(id, low.layers))) == len(set(low.layers))


def test_factors_of_a_matrix_have_the_parameters_of_the_formula() -> None:
    """Two matrices of m x r and r x n, of which a token multiplies each; the rest of the model is as it was."""
    model = catalog.load_model("llama-3.1-8b")
    low = model.with_ranks({7: [MatrixRank(name="transform.up", rank=512), MatrixRank(name="mixer.key", rank=64)]})
    away = 4096 * 14336 - 512 * (4096 + 14336) + 4096 * 1024 - 64 * (4096 + 1024)
    assert model.parameters - low.parameters == away
    assert model.flops_per_token(8192) - low.flops_per_token(8192) == 6.0 * away
    assert [each.name for each in low.layers[6].ranks] == ["mixer.key", "transform.up"]
    named = {tensor.name: (tensor.shape, tensor.divided) for tensor in tensors(low.layers[6])}
    assert named["transform.up.up.weight"] == ((14336, 512), 0)
    assert named["transform.up.down.weight"] == ((512, 4096), None)
    assert "transform.up.weight" not in named
    row = {tensor.name: tensor.divided for tensor in tensors(factored(model).layers[0])}
    assert (row["mixer.output.up.weight"], row["mixer.output.down.weight"]) == (None, 1)


def test_ranks_that_no_matrix_has_are_told_at_once() -> None:
    model = catalog.load_model("llama-2m")
    wrong = [MatrixRank(name="mixer.quary", rank=4), MatrixRank(name="transform.up", rank=10**6)]
    with pytest.raises(ConfigError) as caught:
        model.with_ranks({1: wrong, 2: [MatrixRank(name="mixer.key", rank=0)], 99: []})
    told = str(caught.value)
    assert "did you mean 'mixer.query'?" in told
    assert "1000000 is no rank of transform.up" in told
    assert "0 is no rank of mixer.key" in told
    assert "block 99 is no layer" in told
    twice = replace(model.layers[0], ranks=(MatrixRank(name="mixer.key", rank=4),) * 2)
    with pytest.raises(ConfigError, match="each once"):
        checked_model(replace(model, layers=(twice, *model.layers[1:])))
