"""Routing: how the router of a mixture chooses experts, weighs them, and keeps them evenly loaded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Score(StrEnum):
    """What makes scores of a router's outputs: a softmax over all experts, or a sigmoid each (DeepSeek-V3)."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class Choice(StrEnum):
    """The `top_k` best of all experts, or the best of each of `top_k` equal groups, a softmax in every group alone
    (expert prototyping, 2105.15082)."""

    TOP_K = "top_k"
    PROTOTYPES = "prototypes"


class Weighing(StrEnum):
    """What a chosen expert's output is multiplied by: its score's part of the chosen ones' sum, or its score."""

    NORMALIZED = "normalized"
    SCORE = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token finds its experts. As it stands: the `top_k` best, a softmax over their outputs, none dropped.

    `scale` multiplies every weight. With `weigh_inputs` a weight multiplies what its expert reads in place of what it
    gives, as llama4 has it. Experts lie in `groups` equal runs, of which a token may choose in the
    `chosen_groups` whose two best experts score most (2412.19437). Prototypes weigh by their own softmax.

    `capacity` c drops choices: of a sequence of s tokens an expert takes the first ceil(c s top_k / experts) that
    choose it, by position, so that no token's loss depends on later ones; a dropped choice adds nothing.

    `bias_rate` u > 0 balances without a loss (2408.15664): a bias for each expert is added to scores when experts are
    chosen and not when they are weighed; after a step it grows by u where an expert was chosen less often than the
    mean over the whole batch, and falls by u where more often. `balance_loss` a > 0 adds to what is minimised
    a * experts * sum_e f_e p_e of every sequence, in the mean, where f_e is expert e's part of the choices and p_e its
    mean part of the scores (2101.03961, by sequence as in 2412.19437); the loss that is reported has none of it.
    """

    score: Score = Score.SOFTMAX
    choice: Choice = Choice.TOP_K
    weighing: Weighing = Weighing.NORMALIZED
    scale: float = 1.0
    weigh_inputs: bool = False
    groups: int = 1
    chosen_groups: int = 1
    capacity: float | None = None
    bias_rate: float = 0.0
    balance_loss: float = 0.0

    @property
    def kept_share(self) -> float:
        """The part of all choices that meets an expert where experts are chosen as often as each other."""
        return 1.0 if self.capacity is None else min(1.0, self.capacity)


TOP_K_SOFTMAX = Routing()
