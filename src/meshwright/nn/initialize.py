"""First weights by parameter name, the same whatever the stage, the layout and the world."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from meshwright.nn.decoder import Decoder
from meshwright.spec.model import ModelSpec


def initialize(module: Decoder, *, seed: int) -> None:
    """Every parameter of `module` holds `initial_value` of its name."""
    fill(module, prefix="", model=module.model, seed=seed)


def fill(module: nn.Module, *, prefix: str, model: ModelSpec, seed: int) -> None:
    """Every parameter under `module`, called `prefix` in the whole model, holds the value of its name.

    What is state of the run and no parameter (the bias that balances experts) is zero.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters(prefix=prefix):
            parameter.copy_(initial_value(name, tuple(parameter.shape), model=model, seed=seed))
        for _, buffer in module.named_buffers():
            buffer.zero_()


def initial_value(name: str, shape: tuple[int, ...], *, model: ModelSpec, seed: int) -> Tensor:
    """Scales of norms one; biases and sinks zero; matrices normal with the model's deviation.

    Projections that write to the residual stream are divided by sqrt(2 L) (GPT-2). fp32, drawn on the processor by
    a generator of the name's own.
    """
    parts = name.split(".")
    if any(part.endswith("norm") for part in parts) and parts[-1] == "weight":
        return torch.ones(shape)
    if parts[-1].endswith("bias") or parts[-1] == "sinks":
        return torch.zeros(shape)
    deviation = model.initializer_range
    if parts[0] == "layers" and ("output" in parts or "down" in parts):
        deviation /= math.sqrt(2 * len(model.layers))
    generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**63)
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)
