"""Balance: how often the experts of every layer were chosen in a step, over all ranks, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.nn.mixture import MixtureOfExperts
from meshwright.parallel.experts import mixture_of
from meshwright.spec.model import Mixture, ModelSpec


class Balance:
    """The mixtures among the local `parts` of `model`; `group` are all ranks of the plan, None one alone.

    Ranks that route the same tokens count them as often as each other, which no ratio of counts sees.
    """

    def __init__(
        self, parts: Sequence[nn.Module], *, model: ModelSpec, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        specs = [(index, layer.transform) for index, layer in enumerate(model.layers)]
        self._specs = {index: part for index, part in specs if isinstance(part, Mixture)}
        self._here = {
            int(index): mixture
            for part in parts
            for index, layer in part.get_submodule("layers").named_children()
            if (mixture := mixture_of(layer)) is not None
        }
        self._group, self._device = group, device
        self._counts: Tensor | None = None
        self._before: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Nothing of the step is counted yet."""
        self._counts = None
        for mixture in self._here.values():
            mixture.chosen = None

    def weigh(self, ratio: float) -> None:
        """Losses that balance experts weigh `ratio` times what they did."""
        for mixture in self._here.values():
            mixture.each *= ratio

    def end(self) -> None:
        """Every bias is moved by its rate towards experts that were chosen less than the mean (2408.15664).

        Collective, where the model has one.
        """
        if not any(spec.routing.bias_rate for spec in self._specs.values()):
            return
        counts = dict(zip(self._specs, self.counts(), strict=True))
        self._before = {i: x.balance.clone() for i, x in self._here.items() if x.balance is not None}
        with torch.no_grad():
            for index, mixture in self._here.items():
                _move_bias(mixture, counts[index])

    def undo(self) -> None:
        """Every bias is what it was before the last step."""
        with torch.no_grad():
            for index, before in self._before.items():
                balance = self._here[index].balance
                assert balance is not None, "what moved is there"
                balance.copy_(before)

    def counts(self) -> Tensor:
        """(mixtures of the model, most experts of one), int64: how often each was chosen in the step. Collective."""
        if self._counts is None:
            most = max(spec.experts for spec in self._specs.values())
            counts = torch.zeros(len(self._specs), most, dtype=torch.int64, device=self._device)
            for row, index in enumerate(self._specs):
                chosen = self._here[index].chosen if index in self._here else None
                if chosen is not None:
                    counts[row, : len(chosen)] = chosen
            if self._group is not None:
                dist.all_reduce(counts, group=self._group)
            self._counts = counts
        return self._counts

    def load(self) -> Tensor | None:
        """The most that an expert was chosen over the mean of its layer's, in the worst layer; fp64. Collective.

        None where the model has no experts; 1 is even.
        """
        if not self._specs:
            return None
        counts = self.counts().to(torch.float64)
        experts = torch.tensor([spec.experts for spec in self._specs.values()], device=self._device)
        return (counts.amax(dim=1) * experts / counts.sum(dim=1).clamp(min=1.0)).amax()


def _move_bias(mixture: MixtureOfExperts, counts: Tensor) -> None:
    if mixture.balance is None or not any(parameter.requires_grad for parameter in mixture.parameters()):
        return
    chosen = counts[: mixture.spec.experts].to(torch.float64)
    steps = torch.sign(chosen.mean() - chosen).to(mixture.balance.dtype)
    mixture.balance += mixture.spec.routing.bias_rate * steps
