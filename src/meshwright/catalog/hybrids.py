"""Layers of hybrids, which have one part each where others have a mixer and a feed-forward."""

from __future__ import annotations

from meshwright.spec.blocks import Layer, Mixer, Transform


def single(part: Mixer | Transform) -> Layer:
    """A layer of this part alone."""
    if isinstance(part, Mixer):
        return Layer(mixer=part, transform=None)
    return Layer(mixer=None, transform=part)
