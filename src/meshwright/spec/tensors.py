"""Every parameter tensor of a block by name and shape: what costs and rules by parameter need without a module."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.blocks import Block, Embedding, Head, Layer, Mixture
from meshwright.spec.part_tensors import ParameterTensor, norm_tensors, part_tensors
from meshwright.spec.ranks import factored

__all__ = ["ParameterTensor", "prefix", "states", "tensors"]


def tensors(block: Block) -> tuple[ParameterTensor, ...]:
    """The parameters of `block` in the order in which its module has them; a tied head has no matrix of its own."""
    if isinstance(block, Embedding):
        return tuple(_embedding(block))
    if isinstance(block, Head):
        return tuple(_head(block))
    return tuple(_layer(block))


def states(block: Block) -> tuple[ParameterTensor, ...]:
    """What `block` keeps beside its parameters and no optimizer steps: the bias of choices, the scale of a layer."""
    if not isinstance(block, Layer):
        return ()
    part, found = block.transform, []
    if isinstance(part, Mixture) and part.routing.bias_rate:
        found.append(ParameterTensor(name="transform.balance", shape=(part.experts,)))
    if block.scaled:
        found.append(ParameterTensor(name="scale", shape=(1,)))
    return tuple(found)


def prefix(block: Block, index: int) -> str:
    """What the whole model puts before the names of block `index`: `layers.7.` of block 8."""
    if isinstance(block, Embedding):
        return "embedding."
    return "head." if isinstance(block, Head) else f"layers.{index - 1}."


def _embedding(block: Embedding) -> Iterator[ParameterTensor]:
    yield ParameterTensor(name="tokens.weight", shape=(block.vocab, block.width), divided=0)
    if block.positions:
        yield ParameterTensor(name="positions.weight", shape=(block.positions, block.width))


def _head(block: Head) -> Iterator[ParameterTensor]:
    yield from norm_tensors("norm", block.norm)
    if not block.tied:
        yield ParameterTensor(name="output.weight", shape=(block.vocab, block.width), divided=0)
    if block.bias:
        yield ParameterTensor(name="output.bias", shape=(block.vocab,), divided=0)


def _layer(block: Layer) -> Iterator[ParameterTensor]:
    for place, part in block.places.items():
        yield from factored(part_tensors(place, part), block.ranks)
        yield from norm_tensors(f"{place}_norm", part.norm)
        yield from norm_tensors(f"{place}_post_norm", part.post_norm)
    yield from norm_tensors("sum_norm", block.sum_norm)
    if block.extra_parameters:
        yield ParameterTensor(name="extra", shape=(block.extra_parameters,))
