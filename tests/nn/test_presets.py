"""Every preset is either counted exactly by its module or refused by name."""

from __future__ import annotations

import pytest
import torch

from meshwright import catalog
from meshwright.nn import Decoder, unsupported
from meshwright.spec.errors import ConfigError

NAMES = [entry.name for entry in catalog.models()]
REFUSED = {name for name in NAMES if unsupported(catalog.load_model(name), start=0, stop=10**6)}


def test_most_presets_have_a_module() -> None:
    assert len(REFUSED) <= len(NAMES) // 5


@pytest.mark.parametrize("name", sorted(set(NAMES) - REFUSED))
def test_the_module_of_a_preset_has_its_parameters(name: str) -> None:
    spec = catalog.load_model(name)
    with torch.device("meta"):
        decoder = Decoder(spec)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == spec.parameters


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_preset_without_module_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=r"(have|has) no module"):
        Decoder(catalog.load_model(name))
