"""What backward keeps of every part of a block on a square or cube of tensor ranks, as our own modules run it.

On a square a rank keeps its blocks of what every product reads. On a cube it keeps what it gathered for a product: its
input, of `side` times as many tokens, and the matrix. Norms over features that ranks share are written out in fp32.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.kept import hidden_copies
from meshwright.cost.kept_part import Kept
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.blocks import Attention, Block, Embedding, FeedForward, Head, Layer, Norm

_TOLD = ("saved", "working", "ending", "copied")
_INDEX_BYTES, _HERE_BYTES = 8.0, 1.0  # of a token that is looked up: its row, and whether this rank has it


def kept_on_grids(parts: tuple[Kept, ...], block: Block, sizes: Sizes) -> tuple[Kept, ...]:
    """`parts` of `block` in forward order, which were told for a line of `sizes.tensor` ranks, as a grid keeps them."""
    grid = np.asarray(sizes.grid_dims + sizes.zeros) > 1.0
    found = []
    for part, held in zip(_parts(block), parts, strict=True):
        there = _on_grid(part, held, sizes)
        pairs = {name: (getattr(held, name), getattr(there, name)) for name in _TOLD}
        found.append(replace(held, **{name: np.where(grid, b, a) for name, (a, b) in pairs.items()}))
    return tuple(found)


def _parts(block: Block) -> list[Norm | Attention | FeedForward | Embedding | Head]:
    if isinstance(block, Embedding):
        return [block]
    if isinstance(block, Head):
        return [block] if block.norm is None else [block.norm, block]
    assert isinstance(block, Layer)
    found: list[Norm | Attention | FeedForward | Embedding | Head] = []
    for part in block.parts:
        assert isinstance(part, (Attention, FeedForward)), f"{type(part).__name__} has no place on a grid"
        found += [each for each in (part.norm, part, part.post_norm) if each is not None]
    return found


def _on_grid(part: Norm | Attention | FeedForward | Embedding | Head, held: Kept, sizes: Sizes) -> Kept:
    m, e, side = sizes.tokens, sizes.itemsize, sizes.tensor
    cube = np.asarray(sizes.grid_dims + sizes.zeros) > 2.0
    if isinstance(part, Norm):
        saved = m * (2.0 * part.width / side + 1.0) * sizes.wide
        return replace(held, saved=saved, copied=sizes.zeros + part.parameters / side)
    if isinstance(part, Embedding):
        looked_up = np.where(cube, m * side * (_INDEX_BYTES + _HERE_BYTES), 0.0)
        working = m * part.width / side * e * np.where(cube, side, 1.0)
        return replace(held, saved=looked_up, working=working)
    # What enters a region: a block on a square, gathered over the tokens of a side on a cube.
    block = np.where(cube, 0.0, e * m * part.width * (1.0 - 1.0 / side))
    saved = held.saved - block
    working, ending = np.asarray(held.working) - block, np.asarray(held.ending) - block
    matrices = part.matrix_parameters / np.where(cube, side**2, sizes.ranks)
    vectors = held.copied - part.matrix_parameters / side
    vectors = vectors if isinstance(part, Attention) else sizes.zeros
    if isinstance(part, Attention):
        saved = saved + np.where(cube, _gathered_output(part, sizes), 0.0)
    if isinstance(part, FeedForward):
        own = 1.0 if hidden_copies(gated=part.gated, activation=part.activation) > 1.0 else 0.0
        saved = saved + np.where(cube, e * m * part.hidden * (1.0 - own / side), 0.0)
    saved = saved + np.where(cube, e * matrices, 0.0)
    return replace(held, saved=saved, working=working, ending=ending, copied=vectors + np.where(cube, 0.0, matrices))


def _gathered_output(part: Attention, sizes: Sizes) -> FloatArray:
    """What attention gave is gathered for the product after it, beside what its kernel kept of its own."""
    query = part.heads * part.head_dim / sizes.tensor
    own = sizes.attended > sizes.itemsize
    if part.sinks or part.softcap is not None:
        own = np.ones_like(own)
    return sizes.itemsize * sizes.tokens * query * (sizes.tensor - np.where(own, 1.0, 0.0))
