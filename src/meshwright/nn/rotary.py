"""Rotary position embedding (RoFormer, 2104.09864) with the frequency scalings in use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.spec.model import Rotary, RotaryScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Angles:
    """Cosines and sines (positions, dims / 2) in fp32 (fp64 for fp64 activations); (b, positions, dims / 2) where
    the positions of sequences differ."""

    cos: Tensor
    sin: Tensor


def frequencies(spec: Rotary, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Angle per position of each of the dims / 2 planes."""
    steps = torch.arange(0, spec.dims, 2, dtype=torch.float64) / spec.dims
    found = _scale(spec.theta**-steps, spec).to(dtype)
    if spec.planes is not None:
        found[spec.planes :] = 0.0
    return found


def angles(spec: Rotary, *, start: int, stop: int, device: torch.device, dtype: torch.dtype) -> Angles:
    """The angles of positions [start, stop)."""
    positions = torch.arange(start, stop, dtype=torch.float64)
    table = torch.outer(positions, frequencies(spec, dtype=torch.float64))
    gain = _attention_gain(spec.scaling)
    return Angles(cos=(table.cos() * gain).to(device, dtype), sin=(table.sin() * gain).to(device, dtype))


def rotate(x: Tensor, turn: Angles) -> Tensor:
    """x (b, s, heads, head_dim) with its first dims turned by their positions; the rest passes through.

    Plane i is features i and i + dims / 2. The product is formed in the precision of the angles.
    """
    half = turn.cos.shape[-1]
    cos, sin = turn.cos[..., None, :], turn.sin[..., None, :]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)


def _scale(base: Tensor, spec: Rotary) -> Tensor:
    scaling = spec.scaling
    if scaling is None:
        return base
    if scaling.kind == "llama3":
        return _llama3(base, scaling)
    if scaling.kind == "yarn":
        return _yarn(base, spec, scaling)
    return base / scaling.factor


def _llama3(base: Tensor, scaling: RotaryScaling) -> Tensor:
    """Slow planes stretched by the factor, fast ones kept, a ramp between (Llama 3.1, 2407.21783)."""
    turns = scaling.trained_positions * base / (2 * math.pi)
    ramp = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    keep = ramp.clamp(0.0, 1.0)
    return base * keep + base / scaling.factor * (1 - keep)


def _yarn(base: Tensor, spec: Rotary, scaling: RotaryScaling) -> Tensor:
    """As above with the ramp over planes instead of turns (YaRN, 2309.00071).

    `low_frequency` and `high_frequency` are the paper's alpha and beta, in turns over the trained length; 1 and 32.
    """

    def plane(turns: float) -> float:
        ratio = scaling.trained_positions / (turns * 2 * math.pi)
        return spec.dims * math.log(ratio) / (2 * math.log(spec.theta))

    first, last = plane(max(scaling.high_frequency, scaling.low_frequency)), plane(scaling.low_frequency)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    fast, slow = max(first, 0), min(last, spec.dims - 1)
    ramp = ((torch.arange(spec.dims // 2, dtype=base.dtype) - fast) / max(slow - fast, 1e-3)).clamp(0.0, 1.0)
    return base / scaling.factor * ramp + base * (1 - ramp)


def _attention_gain(scaling: RotaryScaling | None) -> float:
    """YaRN's temperature, folded into the angles."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.gain is not None:
        return scaling.gain
    if scaling.factor <= 1:
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1.0
