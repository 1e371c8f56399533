"""Presets of GPT-2, GPT-3 and the GPT models of the large-scale training papers."""

from __future__ import annotations

from meshwright.catalog.decoders.shapes import GptStyle
from meshwright.spec.blocks import Activation

_GPT2 = "GPT-2 (Radford et al. 2019, table 2)"
_GPT3 = "GPT-3, 2005.14165, table 2.1; width and heads of 13B and 1.3B made to divide"
_PTDP = "Efficient large-scale training on GPU clusters using Megatron-LM, 2104.04473, table 1"
_SELECTIVE = "Reducing activation recomputation, 2205.05198, table 3"
_FRONTIER = "Optimizing distributed training on Frontier, 2312.12705, table 1"
_BLOOM = "BLOOM, 2211.05100, table 3, with learned positions in place of ALiBi"
_MEGATRON2020 = "Megatron-LM, 1909.08053, weak scaling with a vocabulary padded to 51,200"
_NEMOTRON = "Nemotron-4 340B, 2406.11704, table 1"


def _gpt2(name: str, *, layers: int, width: int, heads: int) -> GptStyle:
    return GptStyle(name=name, layers=layers, width=width, heads=heads, source=_GPT2)


def _gpt3(size: str, *, layers: int, width: int, heads: int) -> GptStyle:
    return GptStyle(name=f"gpt3-{size}", layers=layers, width=width, heads=heads, positions=2048, source=_GPT3)


def _megatron(size: str, *, layers: int, width: int, heads: int, source: str, positions: int = 2048) -> GptStyle:
    return GptStyle(
        name=f"gpt-{size}", layers=layers, width=width, heads=heads, vocab=51200, positions=positions, source=source
    )


SHAPES = (
    _gpt2("gpt2-medium", layers=24, width=1024, heads=16),
    _gpt2("gpt2-large", layers=36, width=1280, heads=20),
    _gpt2("gpt2-xl", layers=48, width=1600, heads=25),
    _gpt3("125m", layers=12, width=768, heads=12),
    _gpt3("350m", layers=24, width=1024, heads=16),
    _gpt3("760m", layers=24, width=1536, heads=16),
    _gpt3("1.3b", layers=24, width=2048, heads=16),
    _gpt3("2.7b", layers=32, width=2560, heads=32),
    _gpt3("5b", layers=24, width=4096, heads=32),
    _gpt3("6.7b", layers=32, width=4096, heads=32),
    _gpt3("13b", layers=40, width=5120, heads=40),
    _gpt3("20b", layers=44, width=6144, heads=48),
    _gpt3("175b", layers=96, width=12288, heads=96),
    _megatron("1.7b", layers=24, width=2304, heads=24, source=_PTDP),
    _megatron("3.6b", layers=30, width=3072, heads=32, source=_PTDP),
    _megatron("7.5b", layers=36, width=4096, heads=32, source=_PTDP),
    _megatron("18b", layers=40, width=6144, heads=48, source=_PTDP),
    _megatron("39b", layers=48, width=8192, heads=64, source=_PTDP),
    _megatron("76b", layers=60, width=10240, heads=80, source=_PTDP),
    _megatron("145b", layers=80, width=12288, heads=96, source=_PTDP),
    _megatron("310b", layers=96, width=16384, heads=128, source=_PTDP),
    _megatron("530b", layers=105, width=20480, heads=128, source=f"{_PTDP}; {_SELECTIVE}"),
    _megatron("1t", layers=128, width=25600, heads=160, source=f"{_PTDP}; {_SELECTIVE}"),
    _megatron("22b", layers=48, width=6144, heads=64, source=_SELECTIVE),
    _megatron("175b", layers=96, width=12288, heads=96, source=_SELECTIVE),
    _megatron("1.2b", layers=24, width=1920, heads=15, positions=1024, source=_MEGATRON2020),
    _megatron("2b", layers=30, width=2304, heads=18, positions=1024, source=_MEGATRON2020),
    _megatron("4b", layers=36, width=3072, heads=24, positions=1024, source=_MEGATRON2020),
    _megatron("8.7b", layers=42, width=4096, heads=32, positions=1024, source=_MEGATRON2020),
    _megatron("frontier-22b", layers=48, width=6144, heads=48, source=_FRONTIER),
    _megatron("frontier-175b", layers=96, width=12288, heads=96, source=_FRONTIER),
    _megatron("frontier-1t", layers=128, width=25600, heads=128, source=_FRONTIER),
    GptStyle(name="bloom-176b", layers=70, width=14336, heads=112, vocab=250880, positions=2048, source=_BLOOM),
    GptStyle(
        name="nemotron-4-340b",
        layers=96,
        width=18432,
        heads=96,
        kv_heads=8,
        hidden=73728,
        vocab=256000,
        positions=4096,
        activation=Activation.RELU_SQUARED,
        bias=False,
        tied=False,
        rotary_fraction=0.5,
        source=_NEMOTRON,
    ),
)
