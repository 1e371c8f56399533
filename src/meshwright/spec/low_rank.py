"""What a job says of low rank training: when matrices become two thin factors, of which rank, and when not.

Numbers of steps are shares of the run below 1, and steps from 1 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.spec.model import MatrixRank, ModelSpec
from meshwright.spec.ranks import factor_names

RANK_MULTIPLE = 16  # products of other widths waste lanes
Ranks = Mapping[int, tuple[MatrixRank, ...]]  # by block


@dataclass(frozen=True, slots=True, kw_only=True)
class Factored:
    """What every kind of low rank training has.

    The first `dense_layers` layers and matrices with a dim below `least_dim` stay whole, as do embedding and head.
    Factors get `frobenius_decay` * U V V^T (and U^T U V) into their gradients in place of weight decay (2105.01029); at
    0 each decays by itself.
    The learning rate rises again over `rewarm` steps after the switch. Nothing is switched that would not make a step
    faster by the share `gain`. Where the loss lies above the extrapolated one of the dense model by more than the share
    `rollback` after that, the run goes back, once; None never does. Every `refactorise_every` steps of low rank, 0
    being never, factors are balanced anew and their moments begin, and the learning rate rises over `recovery_steps`
    (2505.22922).
    """

    dense_layers: int = 1
    least_dim: int = 128
    frobenius_decay: float = 1e-4
    rewarm: float = 0.02
    gain: float = 0.05
    rollback: float | None = 0.02
    refactorise_every: int = 0
    recovery_steps: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pufferfish(Factored):
    """Pufferfish (2103.03936): at a given step every matrix has the rank `ratio` of its full one."""

    kind: str = "pufferfish"
    switch_at: float = 0.25
    ratio: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuttlefish(Factored):
    """Cuttlefish (2305.02538): stable ranks are found every `interval` steps, and when they have settled every matrix
    has its own, scaled by full rank over stable rank at the start.

    A rank has settled when its smoothed value changed by at most the share `tolerance` in each of `settled` intervals.
    At `switch_by` the switch is made whatever has settled. No rank is below `least_ratio` of the full one.
    """

    kind: str = "cuttlefish"
    interval: float = 0.02
    tolerance: float = 0.005
    settled: int = 3
    switch_by: float = 0.5
    least_ratio: float = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """No matrix becomes factors."""

    kind: str = "none"


LowRank = Pufferfish | Cuttlefish


def steps_of(number: float, *, total_steps: int) -> int:
    """Steps that `number` says of a run of `total_steps`: its share below 1, steps from 1 on; at least one."""
    return max(1, round(number * total_steps if number < 1 else number))


def switches_last(spec: LowRank, *, total_steps: int) -> int:
    """The step after which the switch is made at the latest."""
    number = spec.switch_at if isinstance(spec, Pufferfish) else spec.switch_by
    return steps_of(number, total_steps=total_steps)


def ranks_of(model: ModelSpec) -> dict[int, tuple[MatrixRank, ...]]:
    """The ranks of a model's matrices, by block."""
    return {index: layer.ranks for index, layer in enumerate(model.layers, start=1) if layer.ranks}


def matrices_with_ranks(model: ModelSpec) -> dict[str, int]:
    """The rank of every matrix that has one, by its name in the whole model without `.weight`."""
    return {f"layers.{block - 1}.{each.name}": each.rank for block, of in ranks_of(model).items() for each in of}


def factors_of(model: ModelSpec) -> frozenset[str]:
    """Names of all factors of a model."""
    return frozenset(half for matrix in matrices_with_ranks(model) for half in factor_names(matrix))
