"""Presets of the MPT models that llm-foundry measures: GPT shapes with learned positions and biases."""

from __future__ import annotations

from meshwright.catalog.decoders.shapes import GptStyle
from meshwright.spec.blocks import Activation

_SOURCE = "mosaicml/llm-foundry scripts/train/benchmarking; parameter counts there agree at 2,048 positions"


def _mpt(size: str, *, layers: int, width: int, heads: int) -> GptStyle:
    return GptStyle(
        name=f"mpt-{size}",
        layers=layers,
        width=width,
        heads=heads,
        vocab=50368,
        positions=2048,
        activation=Activation.GELU,
        source=_SOURCE,
    )


SHAPES = (
    _mpt("125m", layers=12, width=768, heads=12),
    _mpt("350m", layers=24, width=1024, heads=16),
    _mpt("760m", layers=24, width=1536, heads=12),
    _mpt("1b", layers=24, width=2048, heads=16),
    _mpt("3b", layers=32, width=2560, heads=20),
    _mpt("7b", layers=32, width=4096, heads=32),
    _mpt("13b", layers=40, width=5120, heads=40),
    _mpt("30b", layers=48, width=7168, heads=56),
    _mpt("70b", layers=80, width=8192, heads=64),
)
