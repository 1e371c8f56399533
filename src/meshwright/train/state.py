"""TrainState: where a run stands. The only value of a run that changes, and the same on every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.spec.errors import ConfigError, Problem

_MIX = 0x9E3779B97F4A7C15


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Optimizer steps done, tokens trained on, sequences consumed by the whole job, and the seed of all randomness.

    Random state is a function of `seed` and `step` alone, so it needs no generator in a checkpoint and is the same
    whatever the number of ranks.
    """

    step: int = 0
    tokens: int = 0
    consumed: int = 0
    seed: int = 0

    def advance(self, *, sequences: int, tokens: int) -> None:
        """One more step, which consumed `sequences` sequences of `tokens` tokens together."""
        self.step += 1
        self.consumed += sequences
        self.tokens += tokens

    @property
    def random_seed(self) -> int:
        """A 63-bit seed for what is random in the next step."""
        mixed = (self.seed * _MIX + self.step + 1) * _MIX
        mixed ^= mixed >> 29
        return mixed & 0x7FFFFFFFFFFFFFFF

    def to_dict(self) -> dict[str, int]:
        return {"step": self.step, "tokens": self.tokens, "consumed": self.consumed, "seed": self.seed}

    def load(self, values: Mapping[str, Any]) -> None:
        """This state becomes the one that `to_dict` gave. Raises ConfigError when a number is missing."""
        missing = [name for name in self.to_dict() if type(values.get(name)) is not int or values[name] < 0]
        if missing:
            what = "is missing, or is not a whole number from 0"
            raise ConfigError([Problem(what=f"{name!r} {what}", where="checkpoint state") for name in missing])
        self.step, self.tokens = values["step"], values["tokens"]
        self.consumed, self.seed = values["consumed"], values["seed"]
