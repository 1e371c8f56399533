"""First weights follow the name and the seed alone."""

from __future__ import annotations

import torch

from meshwright.nn import Decoder, initialize
from tests.support import models


def weights(start: int = 0, stop: int | None = None, *, seed: int = 0, tied: bool = False) -> dict[str, torch.Tensor]:
    decoder = Decoder(models.all_models()["tied" if tied else "tiny"], start=start, stop=stop)
    initialize(decoder, seed=seed)
    return dict(decoder.named_parameters())


def test_a_stage_has_the_weights_of_the_whole() -> None:
    whole = weights()
    for name, value in weights(2, 6).items():
        assert torch.equal(value, whole[name])


def test_a_tied_head_alone_holds_the_embedding() -> None:
    assert torch.equal(weights(5, 6, tied=True)["embedding.tokens.weight"], weights()["embedding.tokens.weight"])


def test_names_and_seeds_draw_apart() -> None:
    first, second = weights(), weights(seed=1)
    name = "layers.0.mixer.query.weight"
    assert not torch.equal(first[name], second[name])
    assert not torch.equal(first[name], first["layers.1.mixer.query.weight"])


def test_residual_projections_are_scaled_by_depth() -> None:
    values = weights()
    ratio = values["layers.0.mixer.output.weight"].std() / values["layers.0.mixer.query.weight"].std()
    assert abs(float(ratio.detach()) - 8**-0.5) < 0.03
    assert torch.equal(values["head.norm.weight"], torch.ones(32))
