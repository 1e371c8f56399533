"""torch's fused AdamW on lists of plain tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.adamw import adamw

from meshwright.spec.optimizer import OptimizerSpec


def fused_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    steps: Sequence[Tensor],
    spec: OptimizerSpec,
    rate: float,
    weight_decay: float,
) -> None:
    """Every parameter, its `first` and `second` moment and its count of steps took one step (1711.05101), in place."""
    adamw(
        list(parameters),
        list(gradients),
        list(first),
        list(second),
        [],
        list(steps),
        fused=True,
        amsgrad=False,
        beta1=spec.beta1,
        beta2=spec.beta2,
        lr=rate,
        weight_decay=weight_decay,
        eps=spec.epsilon,
        maximize=False,
    )
