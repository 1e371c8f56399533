"""AdamW whose moments or parameters take less than fp32, some elements at a time in full precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.parallel.adamw import fused_step
from meshwright.parallel.clip import local_part
from meshwright.parallel.packed import Packed, Packing, empty
from meshwright.parallel.stochastic import places, random_bits, rounded
from meshwright.parallel.torch_compat import with_local
from meshwright.spec.optimizer import STEP_ELEMENTS, Master, OptimizerSpec

_MOMENTS = ("exp_avg", "exp_avg_sq")


class NarrowAdamWRule:
    """State is `step`, and each moment packed as `spec.state` says: this rank's part of it, as it lies in memory.

    Parameters are bf16 where `spec.master` is, and rounded stochastically: `keys` has a number for each of them.
    """

    def __init__(self, spec: OptimizerSpec, *, keys: Mapping[Tensor, int]) -> None:
        self._spec, self._keys = spec, keys

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        found = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        size, wide = local_part(parameter).numel(), self._wide(parameter)
        for name in _MOMENTS:
            packed = empty(size, form=self._spec.state, device=parameter.device, wide=wide)
            found |= {name: packed.codes, f"{name}_scale": packed.scale}
        return found

    def portable(self, parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state laid out as the parameter is, which any form can read: moments of one byte as copies, in the host's
        memory, of what they stand for; others as they lie."""
        shape, found = local_part(parameter).shape, {"step": state["step"]}
        for name, packing in self._packings(parameter.device).items():
            local = state[name]
            if self._spec.state.in_blocks:
                local = packing.unpack(_packed(state, name), self._wide(parameter)).to("cpu", copy=True)
            like = torch.empty_like(parameter.detach(), dtype=local.dtype)
            found[name] = with_local(like, local.view(shape))
        return found

    def absorb(self, parameter: Tensor, state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """The state stands for `values`, as `portable` gives them."""
        if not self._spec.state.in_blocks:
            return
        for name, packing in self._packings(parameter.device).items():
            packing.pack(local_part(values[name]).reshape(-1).to(parameter.device), _packed(state, name))

    @torch.no_grad()
    def step(
        self, held: Sequence[Tensor], states: Sequence[dict[str, Tensor]], *, rate: float, weight_decay: float
    ) -> None:
        packings: dict[str, Packing] = {}
        for parameter, state in zip(held, states, strict=True):
            packings = packings or self._packings(parameter.device)
            for start, stop in _runs(local_part(parameter).numel()):
                self._some(parameter, state, (start, stop), packings=packings, rate=rate, weight_decay=weight_decay)
            state["step"] += 1

    def _some(
        self,
        parameter: Tensor,
        state: dict[str, Tensor],
        run: tuple[int, int],
        *,
        packings: Mapping[str, Packing],
        rate: float,
        weight_decay: float,
    ) -> None:
        """Elements [start, stop) of this rank's part took one step."""
        assert parameter.grad is not None
        start, stop = run
        wide = self._wide(parameter)
        kept = local_part(parameter.detach()).view(-1)[start:stop]
        values, step = kept.to(wide), state["step"].clone()
        packed = {name: _packed(state, name).part(start, stop) for name in packings}
        moments = {name: packing.unpack(packed[name], wide) for name, packing in packings.items()}
        fused_step(
            [values],
            [local_part(parameter.grad).reshape(-1)[start:stop].to(wide)],
            first=[moments["exp_avg"]],
            second=[moments["exp_avg_sq"]],
            steps=[step],
            spec=self._spec,
            rate=rate,
            weight_decay=weight_decay,
        )
        for name, packing in packings.items():
            packing.pack(moments[name], packed[name])
        if self._spec.master is Master.BF16_STOCHASTIC:
            where = places(parameter, start=start, stop=stop)
            kept.copy_(rounded(values, random_bits(where, step=step, key=self._keys[parameter])))

    def _wide(self, parameter: Tensor) -> torch.dtype:
        return torch.promote_types(parameter.dtype, torch.float32)

    def _packings(self, device: torch.device) -> dict[str, Packing]:
        signed = {"exp_avg": True, "exp_avg_sq": False}
        return {name: Packing(self._spec.state, signed=signed[name], device=device) for name in _MOMENTS}


def _packed(state: Mapping[str, Tensor], name: str) -> Packed:
    return Packed(codes=state[name], scale=state[f"{name}_scale"])


def _runs(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, STEP_ELEMENTS):
        yield start, min(start + STEP_ELEMENTS, size)
