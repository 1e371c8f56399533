"""What attention makes of the positions of queries and keys: rotary angles and a temperature."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched beyond the trained length (`llama3`, `yarn`, `linear`).

    Of `yarn` alone: `gain` multiplies cosines and sines, 0.1 ln(factor) + 1 when None (2309.00071), and `truncate`
    says whether the ramp begins and ends at whole planes.
    """

    kind: str
    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    trained_positions: int = 8192
    gain: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary position embedding on the first `dims` features of every head (RoFormer, 2104.09864).

    Plane i of the dims / 2 turns by theta^(-2 i / dims) a position; with `planes` the first so many alone turn and the
    others stand still, as gemma4 has it (proportional). None is all of them.
    """

    dims: int
    theta: float = 10000.0
    scaling: RotaryScaling | None = None
    planes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """The query at position p is 1 + `gain` log(1 + floor((p + 1) / `positions`)) times as long, so that long contexts
    do not flatten its scores (scalable softmax, 2501.19399; in steps, as llama4 has it)."""

    positions: int
    gain: float
