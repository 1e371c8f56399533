"""The optimizer of a laid model: every parameter by the rule that the job has for its name, on its local part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from meshwright.parallel.adafactor import AdafactorRule
from meshwright.parallel.adamw import fused_step
from meshwright.parallel.clip import local_part
from meshwright.parallel.frobenius import decay_of
from meshwright.parallel.layout import Laid
from meshwright.parallel.muon import MuonRule
from meshwright.parallel.narrow_adamw import NarrowAdamWRule
from meshwright.parallel.offload import AwayRule, Copies
from meshwright.parallel.shards import zeros_as
from meshwright.parallel.stochastic import key_of
from meshwright.spec.low_rank import factors_of
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import Adafactor, Muon, Optimizer, OptimizerSpec, Sgd, Treatment, treatment
from meshwright.spec.plan import Offload, Plan


class Rule(Protocol):
    """How parameters of one kind step: their state when new, and one step of all of them."""

    def state(self, parameter: Tensor) -> dict[str, Tensor]: ...

    def step(
        self, held: Sequence[Tensor], states: Sequence[dict[str, Tensor]], *, rate: float, weight_decay: float
    ) -> None: ...


@runtime_checkable
class Packs(Protocol):
    """A rule whose state only it can read: `portable` is what it stands for, laid out as the parameter is."""

    def portable(self, parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def absorb(self, parameter: Tensor, state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None: ...


class LocalOptimizer(torch.optim.Optimizer):
    """Groups of parameters, each stepped by its `rule` on local parts, so that parameters may live on any meshes.

    A group's learning rate is `lr * factor`. State is distributed as the parameter is.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, learning_rate: float) -> None:
        super().__init__(groups, {"lr": learning_rate, "factor": 1.0, "weight_decay": 0.0})
        self._packing: dict[Tensor, Packs] = {}
        for group in self.param_groups:
            rule = group["rule"].rule if isinstance(group["rule"], AwayRule) else group["rule"]
            if isinstance(rule, Packs):
                self._packing |= dict.fromkeys(group["params"], rule)

    def prepare(self) -> None:
        """Every parameter that trains has its state, as it is before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not self.state[parameter]:
                    self.state[parameter] = group["rule"].state(parameter)

    def unpacked(self) -> dict[Tensor, dict[str, Tensor]]:
        """What the state stands for that only its rule can read, by parameter; `pack` takes it back."""
        return {x: rule.portable(x, self.state[x]) for x, rule in self._packing.items() if self.state.get(x)}

    def pack(self, values: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """The state stands for `values`, as `unpacked` gives them."""
        for parameter, found in values.items():
            self._packing[parameter].absorb(parameter, self.state[parameter], found)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures re-evaluate; nothing here does
        """Every parameter with a gradient took one step. Collective."""
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in held:
                if not self.state[parameter]:
                    self.state[parameter] = group["rule"].state(parameter)
            if held:
                states = [self.state[parameter] for parameter in held]
                rate = group["lr"] * group["factor"]
                group["rule"].step(held, states, rate=rate, weight_decay=group["weight_decay"])


class AdamWRule:
    """torch's fused AdamW; state is named and shaped as torch's own (`step`, `exp_avg`, `exp_avg_sq`)."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec = spec

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": zeros_as(parameter),
            "exp_avg_sq": zeros_as(parameter),
        }

    def step(
        self, held: Sequence[Tensor], states: Sequence[dict[str, Tensor]], *, rate: float, weight_decay: float
    ) -> None:
        # A rank may hold no element of a small parameter; the kernel is not shown empty tensors.
        pairs = [(x, state) for x, state in zip(held, states, strict=True) if local_part(x).numel()]
        if not pairs:
            return
        fused_step(
            [local_part(parameter) for parameter, _ in pairs],
            [local_part(parameter.grad) for parameter, _ in pairs if parameter.grad is not None],
            first=[local_part(state["exp_avg"]) for _, state in pairs],
            second=[local_part(state["exp_avg_sq"]) for _, state in pairs],
            steps=[local_part(state["step"]) for _, state in pairs],
            spec=self._spec,
            rate=rate,
            weight_decay=weight_decay,
        )


class SgdRule:
    """torch's gradient descent; state is `momentum`, and nothing where there is none."""

    def __init__(self, spec: Sgd) -> None:
        self._spec = spec

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        if self._spec.momentum == 0.0:
            return {}
        return {"momentum": zeros_as(parameter)}

    def step(
        self, held: Sequence[Tensor], states: Sequence[dict[str, Tensor]], *, rate: float, weight_decay: float
    ) -> None:
        pairs = [(x, state) for x, state in zip(held, states, strict=True) if local_part(x).numel()]
        if not pairs:
            return
        sgd(
            [local_part(parameter) for parameter, _ in pairs],
            [local_part(parameter.grad) for parameter, _ in pairs if parameter.grad is not None],
            [local_part(state["momentum"]) if state else None for _, state in pairs],
            weight_decay=weight_decay,
            momentum=self._spec.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            fused=True,
            maximize=False,
        )


def build_optimizer(laid: Laid, spec: Optimizer) -> LocalOptimizer:
    """The optimizer of `spec` over the local parameters of `laid`; those that are treated alike are one group.

    Each copy of a tied table is alone where ranks sum what is of the whole: torch adds summands up in an order that
    changes with what else is summed, and copies step alike to the bit.
    """
    chosen: dict[tuple[Treatment, bool, int | None], list[nn.Parameter]] = {}
    keys: dict[Tensor, int] = {}
    copies, away = Copies(laid.device), blocks_away(laid.design.plan)
    factors = factors_of(laid.design.model) if decay_of(laid.design) else frozenset()
    for stage, part in enumerate(laid.parts):
        for name, parameter in part.named_parameters():
            leaves = copies.needed and block_of(name, laid.design.model) in away
            how = treatment(spec, name)
            how = replace(how, weight_decay=0.0) if name in factors else how
            alone = isinstance(how.rule, Adafactor) and name == part.copied_table
            chosen.setdefault((how, leaves, stage if alone else None), []).append(parameter)
            keys[parameter] = key_of(name, seed=laid.design.job.seed)
    groups = []
    for (how, leaves, _), parameters in chosen.items():
        rule = _rule(how.rule, compute=laid.dtypes.compute, keys=keys)
        groups.append(
            {
                "params": parameters,
                "rule": AwayRule(rule, copies=copies) if leaves else rule,
                "factor": how.learning_rate_factor,
                "weight_decay": how.weight_decay,
            }
        )
    return LocalOptimizer(groups, learning_rate=spec.learning_rate)


def blocks_away(plan: Plan) -> frozenset[int]:
    """Blocks whose optimizer state lies in the host's memory."""
    groups = [group for group in plan.groups if group.offload is Offload.OPTIMIZER]
    return frozenset(block for group in groups for block in range(group.start, group.stop))


def block_of(name: str, model: ModelSpec) -> int:
    """Which block of the model has the parameter `name`."""
    place = name.split(".")
    if place[0] == "layers":
        return int(place[1]) + 1
    return 0 if place[0] == "embedding" else len(model.layers) + 1


def _rule(spec: Optimizer, *, compute: torch.dtype, keys: Mapping[Tensor, int]) -> Rule:
    if isinstance(spec, Muon):
        return MuonRule(spec, compute=compute)
    if isinstance(spec, Adafactor):
        return AdafactorRule(spec)
    if isinstance(spec, Sgd):
        return SgdRule(spec)
    return NarrowAdamWRule(spec, keys=keys) if spec.is_narrow else AdamWRule(spec)
