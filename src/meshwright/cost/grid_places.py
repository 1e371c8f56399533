"""How every parameter lies on a square or a cube of tensor ranks, without torch.

A square (Optimus, 2104.05343) has rows and columns; a cube (2105.14450) `inner`, `outer` and `depth`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType

from meshwright.spec.blocks import Attention, Block, Layer, QueryKeyNorm
from meshwright.spec.plan import TensorGrid

Dims = tuple[int | None, ...]  # of each direction of the grid the dim that it divides; None where it repeats


class Role(StrEnum):
    """What a parameter is to a product: a matrix into or out of a region, the table of the vocabulary, or a vector of
    features inside regions, of the residual stream, or of one head."""

    INTO = "into"
    OUT_OF = "out_of"
    TABLE = "table"
    INSIDE = "inside"
    RESIDUAL = "residual"
    HEAD = "head"


_ROLES: tuple[tuple[str, Role], ...] = (
    ("embedding.tokens.weight", Role.TABLE),
    ("*.mixer.output.weight", Role.OUT_OF),
    ("*.transform.down.weight", Role.OUT_OF),
    ("*.mixer.output.bias", Role.RESIDUAL),
    ("*.transform.down.bias", Role.RESIDUAL),
    ("*.mixer.sinks", Role.INSIDE),
    ("head.output.weight", Role.INTO),
    ("head.output.bias", Role.INSIDE),
    ("*.mixer.*_norm.weight", Role.HEAD),
    ("layers.*.mixer.*.weight", Role.INTO),
    ("layers.*.mixer.*.bias", Role.INSIDE),
    ("layers.*.transform.*.weight", Role.INTO),
    ("layers.*.transform.*.bias", Role.INSIDE),
)
# What each direction of the grid divides of (outputs, inputs), (rows, width), or a vector's features.
_SQUARE: Mapping[Role, Dims] = MappingProxyType(
    {
        Role.INTO: (1, 0),
        Role.OUT_OF: (1, 0),
        Role.TABLE: (0, 1),
        Role.INSIDE: (None, 0),
        Role.RESIDUAL: (None, 0),
        Role.HEAD: (None, None),
    }
)
_CUBE: Mapping[Role, Dims] = MappingProxyType(
    {
        Role.INTO: (0, 1, 0),
        Role.OUT_OF: (1, 0, 0),
        Role.TABLE: (0, 1, 0),
        Role.INSIDE: (0, None, None),
        Role.RESIDUAL: (None, 0, None),
        Role.HEAD: (None, None, None),
    }
)
_DIMS: Mapping[TensorGrid, Mapping[Role, Dims]] = MappingProxyType({TensorGrid.SQUARE: _SQUARE, TensorGrid.CUBE: _CUBE})


def role_of(name: str, *, block: Block) -> Role:
    """What parameter `name` of `block` is; the name is the whole model's."""
    found = next((role for pattern, role in _ROLES if fnmatchcase(name, pattern)), Role.RESIDUAL)
    mixer = block.mixer if isinstance(block, Layer) else None
    whole = isinstance(mixer, Attention) and mixer.qk_norm is QueryKeyNorm.FULL
    return Role.INSIDE if found is Role.HEAD and whole else found


def divided_dims(name: str, *, block: Block, grid: TensorGrid) -> Dims:
    """The dim of parameter `name` that each direction of the grid divides, in the order in which they do."""
    found = _DIMS[grid][role_of(name, block=block)]
    if name == "embedding.positions.weight":
        return tuple(None if dim is None else 1 for dim in found)
    return found
