"""Any run of blocks is the model: parameters counted, stages composed, masks and every kind of block exact."""

from __future__ import annotations

import pytest
import torch

from meshwright.nn import Decoder, Sampling, generate, initialize
from meshwright.spec.errors import ConfigError
from meshwright.spec.model import Recurrence
from tests.support import models

MODELS = models.all_models()
# Where a token stands in its sequence counts, not where in its document.
OF_PLACES = ("gpt", "chunk", "mixture_weighed_inputs")
S = 16


def build(name: str, *, start: int = 0, stop: int | None = None) -> Decoder:
    decoder = Decoder(MODELS[name], start=start, stop=stop).double()
    initialize(decoder, seed=3)
    return decoder


def tokens(count: int = 2, length: int = S) -> torch.Tensor:
    return torch.randint(0, models.VOCAB, (count, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_the_module_has_exactly_the_parameters_that_the_spec_counts(name: str) -> None:
    with torch.device("meta"):
        decoder = Decoder(MODELS[name])
    assert sum(parameter.numel() for parameter in decoder.parameters()) == MODELS[name].parameters


@pytest.mark.parametrize("name", MODELS)
def test_stages_in_a_row_are_the_model(name: str) -> None:
    whole, batch = build(name), tokens()
    x = batch
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        x = build(name, start=start, stop=stop)(x)
    torch.testing.assert_close(x, whole(batch), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_no_position_sees_a_later_one(name: str) -> None:
    decoder, batch = build(name), tokens()
    changed = batch.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % models.VOCAB
    before, after = decoder(batch), decoder(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OF_PLACES])
def test_documents_packed_together_do_not_meet(name: str) -> None:
    decoder, batch = build(name), tokens()
    documents = (torch.arange(S) >= 6).int().expand(2, S)
    packed = decoder(batch, documents=documents)
    torch.testing.assert_close(packed[:, :6], decoder(batch[:, :6]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(packed[:, 6:], decoder(batch[:, 6:]), rtol=1e-10, atol=1e-10)


def test_a_window_limits_how_far_back_a_position_sees() -> None:
    one = models.model(layers=1, layer=MODELS["window"].layers[0])
    decoder = Decoder(one).double()
    initialize(decoder, seed=0)
    batch = tokens()
    changed = batch.clone()
    changed[:, 0] = (changed[:, 0] + 1) % models.VOCAB
    difference = (decoder(batch) - decoder(changed)).abs().amax(dim=(0, 2))
    assert (difference[:5] > 0).all()
    assert (difference[5:] == 0).all()


@pytest.mark.parametrize("name", ["tiny", "gpt", "window", "sinks", "latent", "mixture"])
def test_generation_with_memory_equals_reading_all_again(name: str) -> None:
    decoder = build(name)
    found = list(generate(decoder, [1, 2, 3], count=20, sampling=Sampling(temperature=0.0)))
    read = [1, 2, 3]
    for _ in range(20):
        read.append(int(decoder(torch.tensor([read]))[0, -1].argmax()))
    assert found == read[3:]


def test_generation_goes_on_past_the_longest_context() -> None:
    assert len(list(generate(build("tiny"), [5], count=150))) == 150


def test_sampling_is_repeatable_and_moves_with_the_seed() -> None:
    decoder = build("tiny")
    first = list(generate(decoder, [1], count=30, sampling=Sampling(seed=1)))
    assert first == list(generate(decoder, [1], count=30, sampling=Sampling(seed=1)))
    assert first != list(generate(decoder, [1], count=30, sampling=Sampling(seed=2)))


def test_names_are_those_of_the_whole_model() -> None:
    whole = {name for name, _ in build("tiny").named_parameters()}
    stages = [{name for name, _ in build("tiny", start=a, stop=b).named_parameters()} for a, b in ((0, 3), (3, 6))]
    assert stages[0] | stages[1] == whole
    assert not stages[0] & stages[1]
    assert {"embedding.tokens.weight", "layers.3.mixer.query.weight", "head.norm.weight"} <= whole


def test_what_has_no_module_is_said_by_name() -> None:
    mixer = Recurrence(width=32, inner=64, heads=4, state=8, groups=1, convolution=4, norm=models.NORM)
    layer = MODELS["tiny"].layers[0].__class__(mixer=mixer, transform=None)
    with pytest.raises(ConfigError, match=r"layers\[1\].mixer: recurrent"):
        Decoder(models.model(layer=layer))
