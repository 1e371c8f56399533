"""Factored matrices: what they compute, and how they begin."""

from __future__ import annotations

import torch

from meshwright.nn import Decoder, initialize
from meshwright.nn.low_rank import balanced_factors
from meshwright.spec.model import MatrixRank
from meshwright.spec.ranks import factor_names, factorable
from tests.support import models


def test_factors_of_a_matrix_are_balanced_and_nearest_to_it() -> None:
    matrix = torch.randn(24, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    up, down = balanced_factors(matrix, 8)
    values = torch.linalg.svdvals(matrix)
    torch.testing.assert_close((matrix - up @ down).norm(), values[8:].norm())
    torch.testing.assert_close(up.T @ up, down @ down.T)
    torch.testing.assert_close((up.T @ up).diagonal(), values[:8])
    for mirrored, factor in zip(balanced_factors(-matrix, 8), (up, -down), strict=True):
        torch.testing.assert_close(mirrored, factor)


def test_a_model_of_full_ranks_begins_as_the_dense_one() -> None:
    """And gives what it gives: forward of every kind of factored part, with and without biases."""
    for dense in (models.gpt(), models.all_models()["mixture_full"], models.all_models()["latent"]):
        full = {name: min(shape) for name, shape in factorable(dense.layers[0].places).items()}
        ranks = [MatrixRank(name=name, rank=rank) for name, rank in full.items()]
        low = dense.with_ranks(dict.fromkeys(range(1, len(dense.layers) + 1), ranks))
        tokens = torch.randint(0, models.VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
        outputs = []
        for model in (dense, low):
            decoder = Decoder(model).double()
            initialize(decoder, seed=3)
            outputs.append(decoder(tokens))
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)  # factors are drawn in fp32


def test_a_model_of_products_gives_what_the_factored_one_gives() -> None:
    low = models.factored(models.gpt())
    decoder, whole = Decoder(low).double(), Decoder(low.dense()).double()
    initialize(decoder, seed=3)
    held = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            halves = [held[half] for half in factor_names(name)] if name not in held else []
            parameter.copy_(halves[0] @ halves[1] if halves else held[name])
    tokens = torch.randint(0, models.VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(whole(tokens), decoder(tokens), rtol=0, atol=1e-9)
