"""Presets of the Llama family and of decoders shaped like it."""

from __future__ import annotations

from meshwright.catalog.decoders.shapes import LlamaStyle
from meshwright.spec.positions import RotaryScaling

_LLAMA1 = "LLaMA, 2302.13971, table 2"
_LLAMA2 = "Llama 2, 2307.09288, tables 1 and appendix A.2.1; vocabulary 32,000"
_LLAMA3 = "The Llama 3 herd of models, 2407.21783, table 3; vocabulary 128,256; trained at 8,192 positions"
_LLAMA32 = "meta-llama/Llama-3.2-3B config.json"
_STRETCHED = RotaryScaling(kind="llama3", factor=32.0)
_LAYOUTS = "Efficient parallelization layouts, 2311.05610: Llama shapes with a 128,000 vocabulary"


def _llama1(size: str, *, layers: int, width: int, heads: int, hidden: int) -> LlamaStyle:
    return LlamaStyle(
        name=f"llama-{size}",
        layers=layers,
        width=width,
        heads=heads,
        hidden=hidden,
        vocab=32000,
        max_positions=2048,
        eps=1e-6,
        source=_LLAMA1,
    )


def _llama2(size: str, *, layers: int, width: int, heads: int, hidden: int, kv_heads: int | None = None) -> LlamaStyle:
    return LlamaStyle(
        name=f"llama-2-{size}",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden,
        vocab=32000,
        source=_LLAMA2,
    )


def _llama3(size: str, *, layers: int, width: int, heads: int, hidden: int) -> LlamaStyle:
    return LlamaStyle(
        name=f"llama-3-{size}",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=8,
        hidden=hidden,
        vocab=128256,
        max_positions=8192,
        theta=500000.0,
        source=_LLAMA3,
    )


def _layouts(size: str, *, layers: int, width: int, heads: int, hidden: int) -> LlamaStyle:
    return LlamaStyle(
        name=f"llama-{size}-128k",
        layers=layers,
        width=width,
        heads=heads,
        hidden=hidden,
        vocab=128000,
        max_positions=2048,
        source=_LAYOUTS,
    )


SHAPES = (
    _llama1("7b", layers=32, width=4096, heads=32, hidden=11008),
    _llama1("13b", layers=40, width=5120, heads=40, hidden=13824),
    _llama1("30b", layers=60, width=6656, heads=52, hidden=17920),
    _llama1("65b", layers=80, width=8192, heads=64, hidden=22016),
    _llama2("7b", layers=32, width=4096, heads=32, hidden=11008),
    _llama2("13b", layers=40, width=5120, heads=40, hidden=13824),
    _llama2("34b", layers=48, width=8192, heads=64, hidden=22016, kv_heads=8),
    _llama2("70b", layers=80, width=8192, heads=64, hidden=28672, kv_heads=8),
    _llama3("8b", layers=32, width=4096, heads=32, hidden=14336),
    _llama3("70b", layers=80, width=8192, heads=64, hidden=28672),
    LlamaStyle(
        name="llama-3.2-3b",
        layers=28,
        width=3072,
        heads=24,
        kv_heads=8,
        head_dim=128,
        hidden=8192,
        vocab=128256,
        max_positions=131072,
        theta=500000.0,
        scaling=_STRETCHED,
        tied=True,
        source=_LLAMA32,
    ),
    LlamaStyle(
        name="internlm-7b",
        layers=32,
        width=4096,
        heads=32,
        hidden=11008,
        vocab=103168,
        max_positions=2048,
        source="InternLM-7B as measured by InternEvo, without its attention biases",
    ),
    _layouts("13b", layers=40, width=5120, heads=40, hidden=13824),
    _layouts("30b", layers=60, width=6656, heads=52, hidden=17920),
)
