"""AdamW over the local parts of whatever the layout made of the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from meshwright.parallel.clip import local_part
from meshwright.parallel.layout import Laid
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import OptimizerSpec


class LocalAdamW(torch.optim.AdamW):
    """torch's AdamW whose fused step works on local parts, so that parameters may live on different meshes.

    State is named and shaped as torch's own (`step`, `exp_avg`, `exp_avg_sq`, distributed as the parameter is).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures re-evaluate; nothing here does
        """Every parameter with a gradient took one AdamW step."""
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in held:
                self._prepare(parameter)
            # A rank may hold no element of a small parameter; the kernel is not shown empty tensors.
            held = [parameter for parameter in held if local_part(parameter).numel()]
            if held:
                self._step(group, held)

    def _prepare(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _step(self, group: dict[str, Any], held: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in held]
        beta1, beta2 = group["betas"]
        adamw(
            [local_part(parameter) for parameter in held],
            [local_part(parameter.grad) for parameter in held if parameter.grad is not None],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [local_part(state["step"]) for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def decays(name: str) -> bool:
    """Matrices decay; norms, biases, sinks and embeddings do not."""
    parts = name.split(".")
    small = parts[-1].endswith("bias") or parts[-1] == "sinks" or any(part.endswith("norm") for part in parts)
    return not small and parts[0] != "embedding"


def build_optimizer(laid: Laid, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """The optimizer that `spec` names over the local parameters of `laid`: matrices in a group that decays first."""
    if spec.kind != "adamw":
        raise ConfigError(
            Problem(what=f"optimizer {spec.kind!r} is unknown", where="job.optimizer.kind", fix="use 'adamw'")
        )
    chosen: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for part in laid.parts:
        for name, parameter in part.named_parameters():
            chosen[decays(name)].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": spec.weight_decay if decay else 0.0}
        for decay, parameters in chosen.items()
        if parameters
    ]
    return LocalAdamW(
        groups, lr=spec.learning_rate, betas=(spec.beta1, spec.beta2), eps=spec.epsilon, weight_decay=spec.weight_decay
    )
