"""Peaks of context ranks that meet around a ring, by gathering and after trading tokens for heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.spec.exchange import Exchange, ExchangeKind, TokenLayout
from meshwright.spec.model import FeedForward, Layer
from meshwright.spec.plan import Design, Offload, Sharding
from tests.run.test_dry_memory import DENSE, LATENT, MIXER, NORM, WIDTH, asked, hold, with_groups
from tests.support.designs import Layout

LENGTH = 16384
EXCHANGES = {
    "ring": Exchange(),
    "ring of runs": Exchange(layout=TokenLayout.CONTIGUOUS),
    "gather": Exchange(kind=ExchangeKind.GATHER),
    "trade": Exchange(inner=4),
    "trade in a ring": Exchange(inner=2),
}
# Little is done beside attention here: where layers kept more, the transform's backward would have most.
NARROW = FeedForward(width=WIDTH, hidden=256, norm=NORM)
LAYERS = {
    "few keys": Layer(mixer=replace(MIXER, kv_heads=2), transform=NARROW),
    "many keys": Layer(mixer=replace(MIXER, kv_heads=8), transform=NARROW),
    "half turned": Layer(mixer=replace(MIXER, rotary=replace(MIXER.rotary, dims=64)), transform=NARROW),
    "capped": Layer(mixer=replace(MIXER, softcap=50.0), transform=NARROW),
    "latent": Layer(mixer=LATENT, transform=NARROW),
    "wide transform": DENSE,
}


def met(layer: str, exchange: str, *, offload: Offload = Offload.NONE) -> Design:
    layout = Layout(context=4, sharding=Sharding.PARAMETERS, batch=1)
    found = asked(LAYERS[layer], layout, length=LENGTH, layers=4, vocab=512)
    found = replace(found, plan=replace(found.plan, exchange=EXCHANGES[exchange]))
    return with_groups(found, offload=offload)


def test_peaks_of_ranks_that_meet_are_predicted() -> None:
    hold({name: met("few keys", name, offload=Offload.ACTIVATIONS) for name in ("ring", "gather", "trade")})


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("offload", [Offload.NONE, Offload.ACTIVATIONS], ids=str)
def test_peaks_of_every_way_to_meet_are_too(layer: str, offload: Offload) -> None:
    hold({name: met(layer, name, offload=offload) for name in EXCHANGES})
