"""What low rank training remembers between steps, as a checkpoint keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from meshwright.spec.model import MatrixRank


class Stage(StrEnum):
    """The dense model is trained and watched; a switch is due; factors are trained and the loss is watched; the way
    back is due; factors are trained to the end, or the dense model is."""

    WATCHING = "watching"
    DUE = "due"
    GUARDED = "guarded"
    RETURNING = "returning"
    FACTORED = "factored"
    DENSE = "dense"


@dataclass(slots=True, kw_only=True)
class Memory:
    """`tracks` are stable ranks by matrix, one an interval from the start, the last one of step `tracked`; `vectors`
    the last singular vectors, bf16 in base64; `losses` those of the newest steps, and `before` those of the dense model
    up to the switch."""

    stage: Stage = Stage.WATCHING
    tracks: dict[str, tuple[float, ...]] = field(default_factory=dict)
    vectors: dict[str, str] = field(default_factory=dict)
    tracked: int = 0
    losses: tuple[float, ...] = ()
    before: tuple[float, ...] = ()
    switched: int = 0
    balanced: int = 0
    ranks: dict[int, tuple[MatrixRank, ...]] = field(default_factory=dict)

    def lose(self, loss: float, *, most: int) -> None:
        """One more step's loss, of which the newest `most` are kept."""
        self.losses = (*self.losses, loss)[-most:]

    def factor(self, step: int) -> None:
        """The switch was made after `step`; what only the dense model needed is forgotten."""
        self.stage, self.switched, self.balanced = Stage.GUARDED, step, step
        self.before, self.losses = self.losses, ()
        self.forget()

    def stay_dense(self) -> None:
        self.stage = Stage.DENSE
        self.before, self.losses = (), ()
        self.forget()

    def forget(self) -> None:
        """Nothing of ranks is watched any more."""
        self.tracks, self.vectors = {}, {}
