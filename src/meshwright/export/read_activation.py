"""The activation that flags of pretrain_gpt.py ask for, which Megatron-LM and Megatron-DeepSpeed read alike."""

from __future__ import annotations

from meshwright.export.script import Given


def read_activation(given: Given, *, gated: bool, bias: bool) -> str:
    """F.gelu is exact; fused with its bias, which is the default, and as openai-gelu it is the tanh form."""
    if gated or given.on("--squared-relu"):
        return "silu" if gated else "relu_squared"
    fused = bias and not given.on("--no-bias-gelu-fusion")
    return "gelu_tanh" if fused or given.on("--openai-gelu") else "gelu"
