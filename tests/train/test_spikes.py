"""Steps that leap: found above those of late, and never in what is as noisy as it was."""

from __future__ import annotations

import random

from meshwright.spec.job import Spike, SpikeSpec
from meshwright.train.spikes import Usual

SPEC = SpikeSpec(policy=Spike.SKIP)


def noisy(usual: Usual, *, steps: int, seed: int = 0) -> int:
    """How many of so many steps of a falling and noisy loss leap."""
    draw, leaps = random.Random(seed), 0
    for step in range(steps):
        loss, norm = 2.0 + 9.0 / (1.0 + step) + draw.gauss(0.0, 0.05), abs(draw.gauss(1.0, 0.2))
        leaps += bool(usual.unusual(loss=loss, norm=norm))
        usual.note(loss=loss, norm=norm)
    return leaps


def test_a_noisy_run_has_no_leaps_and_a_leap_of_either_is_told() -> None:
    usual = Usual(spec=SPEC)
    assert noisy(usual, steps=5_000) == 0
    assert usual.unusual(loss=2.0, norm=1.0) == ""
    assert usual.unusual(loss=4.0, norm=1.0).startswith("its loss of 4 is above 2.")
    assert usual.unusual(loss=2.0, norm=9.0).endswith("6 deviations from the last 128")
    assert "its gradient norm of 9 is above" in usual.unusual(loss=2.0, norm=9.0)


def test_nothing_is_judged_before_half_a_window_is_known_nor_where_it_is_ignored() -> None:
    usual, ignoring = Usual(spec=SPEC), Usual(spec=SpikeSpec())
    noisy(usual, steps=63)
    assert usual.unusual(loss=1e6, norm=1e6) == ""
    noisy(usual, steps=1)
    assert usual.unusual(loss=1e6, norm=1e6)
    noisy(ignoring, steps=200)
    assert ignoring.unusual(loss=1e6, norm=1e6) == ""
    assert ignoring.to_dict() == {"seen": []}


def test_what_is_usual_goes_on_with_a_run() -> None:
    usual, again = Usual(spec=SPEC), Usual(spec=SPEC)
    noisy(usual, steps=200)
    again.load(usual.to_dict())
    assert again.seen == usual.seen
    assert len(again.seen) == SPEC.window
    again.load({})
    assert not again.seen
