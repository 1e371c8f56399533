"""Optimizers: a tagged union by `kind`, and groups of parameters that each say what is different for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType


class OptimizerKind(StrEnum):
    ADAMW = "adamw"
    MUON = "muon"
    SGD = "sgd"
    ADAFACTOR = "adafactor"


MOMENT_BLOCK = 256  # neighbours that share a scale in moments of one byte
STEP_ELEMENTS = 2**22  # that a step holds in full precision at a time where moments or parameters take less


class Moments(StrEnum):
    """What AdamW keeps its moments in: fp32, bf16, or one byte with a scale for MOMENT_BLOCK of them.

    Bytes are the dynamic map of 8-bit optimizers (2110.02861) or e4m3.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    DYNAMIC8 = "dynamic8"
    FP8 = "fp8"

    @property
    def in_blocks(self) -> bool:
        return self in (Moments.DYNAMIC8, Moments.FP8)


class Master(StrEnum):
    """What parameters that bf16 multiplies are kept in: fp32, or bf16 alone, rounded stochastically (1502.02551)."""

    FP32 = "fp32"
    BF16_STOCHASTIC = "bf16_stochastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """What is different for the parameters whose whole-model names match one of `names` (`layers.*.mixer.*`).

    Of all groups that match a name the first that says a thing holds. The learning rate is multiplied by
    `learning_rate_factor`; `weight_decay` and `kind` take the place of the optimizer's. A group of another kind has
    that kind's defaults for what the job's optimizer has no field of. None leaves a thing as it is.
    """

    names: tuple[str, ...]
    learning_rate_factor: float | None = None
    weight_decay: float | None = None
    kind: OptimizerKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """AdamW (1711.05101). Matrices decay by `weight_decay`; norms, biases and embeddings do not, unless groups say.

    `state` is what moments are kept in, and `master` what parameters are. Under fp64 both fp32 are fp64.
    """

    kind: str = "adamw"
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    groups: tuple[ParameterGroup, ...] = ()
    state: Moments = Moments.FP32
    master: Master = Master.FP32

    @property
    def is_narrow(self) -> bool:
        """Moments or parameters take less than usual."""
        return self.state is not Moments.FP32 or self.master is not Master.FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """Muon (2502.16982) for matrices of layers, AdamW by `beta1`, `beta2` and `epsilon` for the rest.

    Nesterov momentum is made orthogonal by `steps` of a Newton-Schulz iteration of fifth order and scaled by
    0.2 sqrt(max(rows, columns)), so that its elements are as large as AdamW's and one learning rate does for both.
    """

    kind: str = "muon"
    learning_rate: float = 3e-4
    momentum: float = 0.95
    steps: int = 5
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    groups: tuple[ParameterGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Gradient descent with momentum, torch's: decay is added to the gradient. Without momentum it keeps no state."""

    kind: str = "sgd"
    learning_rate: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    groups: tuple[ParameterGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor:
    """Adafactor (1804.04235): second moments of a matrix as its row and column means, no first moment.

    They fade by 1 - t^-`decay_exponent` at step t. An update of a root mean square above `clip_update` is scaled down
    to it; `learning_rate` is not scaled by the parameter. Weight decay is AdamW's.
    """

    kind: str = "adafactor"
    learning_rate: float = 1e-3
    decay_exponent: float = 0.8
    clip_update: float = 1.0
    epsilon_squared: float = 1e-30
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    groups: tuple[ParameterGroup, ...] = ()


Optimizer = OptimizerSpec | Muon | Sgd | Adafactor
_MADE: Mapping[str, type[Optimizer]] = MappingProxyType(
    {
        OptimizerKind.ADAMW: OptimizerSpec,
        OptimizerKind.MUON: Muon,
        OptimizerKind.SGD: Sgd,
        OptimizerKind.ADAFACTOR: Adafactor,
    }
)
_VECTORS = ("*norm.*", "*bias", "*.sinks", "*.expert_scale")
_SMALL = ("embedding.*", *_VECTORS)
_OUTSIDE_LAYERS = ("head.*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """How one parameter is optimized: `rule` has its kind and that kind's fields, without groups."""

    rule: Optimizer
    learning_rate_factor: float
    weight_decay: float


def default_groups(spec: Optimizer) -> tuple[ParameterGroup, ...]:
    """What holds for every job after its own groups: what is no matrix does not decay, and is not Muon's."""
    other = OptimizerKind.ADAMW if isinstance(spec, Muon) else None
    small = ParameterGroup(names=_SMALL, weight_decay=0.0, kind=other)
    return (small,) if other is None else (small, ParameterGroup(names=_OUTSIDE_LAYERS, kind=other))


def treatment(spec: Optimizer, name: str) -> Treatment:
    """How `spec` optimizes the parameter that the whole model calls `name`; Muon takes matrices alone."""
    matching = [g for g in (*spec.groups, *default_groups(spec)) if any(fnmatchcase(name, p) for p in g.names)]
    factor = next((g.learning_rate_factor for g in matching if g.learning_rate_factor is not None), 1.0)
    decay = next((g.weight_decay for g in matching if g.weight_decay is not None), spec.weight_decay)
    kind = next((g.kind for g in matching if g.kind is not None), spec.kind)
    if kind == OptimizerKind.MUON and any(fnmatchcase(name, pattern) for pattern in _VECTORS):
        kind = OptimizerKind.ADAMW
    return Treatment(rule=as_kind(spec, kind), learning_rate_factor=factor, weight_decay=decay)


def as_kind(spec: Optimizer, kind: str) -> Optimizer:
    """The optimizer `kind` with what it has in common with `spec`, and its defaults for the rest; no groups."""
    made = _MADE[kind]
    shared = {f.name for f in fields(made)} & {f.name for f in fields(spec)} - {"kind", "groups"}
    return made(**{name: getattr(spec, name) for name in shared})
