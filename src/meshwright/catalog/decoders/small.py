"""Presets that train in minutes on a laptop: Llama shapes with widths that are multiples of 64."""

from __future__ import annotations

from meshwright.catalog.decoders.shapes import LlamaStyle

_SOURCE = "meshwright: small models for processors"


def _small(
    name: str, *, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int = 4096
) -> LlamaStyle:
    return LlamaStyle(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden,
        vocab=vocab,
        max_positions=2048,
        tied=True,
        source=_SOURCE,
    )


SHAPES = (
    _small("tiny", layers=4, width=64, heads=8, kv_heads=4, hidden=128, vocab=256),
    _small("llama-2m", layers=8, width=128, heads=4, kv_heads=2, hidden=384),
    _small("llama-5m", layers=8, width=256, heads=8, kv_heads=4, hidden=448),
    _small("llama-11m", layers=8, width=384, heads=12, kv_heads=4, hidden=704),
    _small("llama-26m", layers=8, width=512, heads=16, kv_heads=4, hidden=1536),
)
