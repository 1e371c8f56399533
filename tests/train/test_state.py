"""TrainState: counting, and going through JSON values and back."""

from __future__ import annotations

import pytest

from meshwright.spec.errors import ConfigError
from meshwright.train.state import TrainState


def test_advance_counts_steps_sequences_and_tokens() -> None:
    state = TrainState(seed=3)
    state.advance(sequences=8, tokens=512)
    state.advance(sequences=8, tokens=512)
    assert (state.step, state.consumed, state.tokens) == (2, 16, 1024)


def test_round_trip() -> None:
    state, other = TrainState(step=5, tokens=7, consumed=2, seed=9), TrainState()
    other.load(state.to_dict())
    assert other == state


def test_a_missing_number_is_named() -> None:
    with pytest.raises(ConfigError, match="'consumed' is missing"):
        TrainState().load({"step": 1, "tokens": 1, "seed": 0})


def test_the_random_seed_is_a_function_of_seed_and_step() -> None:
    seeds = {TrainState(seed=seed, step=step).random_seed for seed in range(20) for step in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert TrainState(seed=1, step=2).random_seed == TrainState(seed=1, step=2, tokens=99).random_seed
