"""First weights by parameter name, the same whatever the stage, the layout and the world."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from meshwright.nn.decoder import Decoder
from meshwright.nn.low_rank import FactoredLinear, balanced_factors
from meshwright.spec.model import ModelSpec


def initialize(module: Decoder, *, seed: int) -> None:
    """Every parameter of `module` holds `initial_value` of its name."""
    fill(module, prefix="", model=module.model, seed=seed)


def fill(module: nn.Module, *, prefix: str, model: ModelSpec, seed: int) -> None:
    """Every parameter under `module`, called `prefix` in the whole model, holds the value of its name; factors of a
    matrix are those whose product is nearest to what the matrix would hold.

    What is state of the run and no parameter begins where it changes nothing: the bias that balances experts at zero,
    the scale of a layer at one.
    """
    products = {name: part for name, part in module.named_modules(prefix=prefix) if isinstance(part, FactoredLinear)}
    factors = {f"{name}.{half}.weight" for name in products for half in ("up", "down")}
    with torch.no_grad():
        for name, part in products.items():
            shape, rank = (len(part.up.weight), part.down.weight.shape[1]), len(part.down.weight)
            whole = initial_value(f"{name}.weight", shape, model=model, seed=seed)
            for half, value in zip((part.up, part.down), balanced_factors(whole, rank), strict=True):
                half.weight.copy_(value)
        for name, parameter in module.named_parameters(prefix=prefix):
            if name not in factors:
                parameter.copy_(initial_value(name, tuple(parameter.shape), model=model, seed=seed))
        for name, buffer in module.named_buffers():
            buffer.fill_(1.0 if name.rpartition(".")[2] == "scale" else 0.0)


def initial_value(name: str, shape: tuple[int, ...], *, model: ModelSpec, seed: int) -> Tensor:
    """Scales one; biases and sinks zero; matrices normal with the model's deviation.

    Projections that write to the residual stream are divided by sqrt(2 L) (GPT-2). fp32, drawn on the processor by
    a generator of the name's own.
    """
    parts = name.split(".")
    if parts[-1] == "expert_scale" or (any(part.endswith("norm") for part in parts) and parts[-1] == "weight"):
        return torch.ones(shape)
    if parts[-1].endswith("bias") or parts[-1] == "sinks":
        return torch.zeros(shape)
    deviation = model.initializer_range
    if parts[0] == "layers" and ("output" in parts or "down" in parts):
        deviation /= math.sqrt(2 * len(model.layers))
    generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**63)
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)
