"""Parts of a layer some of whose matrices are products of two thin ones: what changes of their work and their bytes.

Where W (m, n) is U V, x is multiplied by V and what comes of it, `rank` features a token, by U. Tensor ranks divide the
factor that has the dim they would divide of W; the other is whole on each, as are the features between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.copied_heads import divided_by
from meshwright.cost.kept_part import Kept
from meshwright.cost.work import FloatArray, PartWork, Product, Sizes
from meshwright.spec.model import Attention, Block, Layer
from meshwright.spec.ranks import MatrixRank, factored
from meshwright.spec.tensors import tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Thin:
    """One matrix by its name in its part; `parameters` are those of its factors less its own, on one tensor rank, and
    `whole` those of the factor that every one of them has, where they divide the other. `tokens` times as many tokens
    are multiplied as the layer sees."""

    name: str
    rank: int
    tokens: float
    parameters: FloatArray
    whole: int


def thin_matrices(layer: Layer, place: str, tensor: FloatArray) -> tuple[Thin, ...]:
    """Those of the part at `place`, `mixer` or another, where `tensor` ranks lie on a line."""
    ranks = [each for each in layer.ranks if each.name.startswith(f"{place}.")]
    return tuple(_thin(layer, each, place, tensor) for each in ranks)


def summed_elements(block: Block) -> int:
    """Elements of gradients that tensor ranks sum once a step, where they divide the matrices of `block`: those of the
    factors that each of them has."""
    if not isinstance(block, Layer):
        return 0
    return sum(each.whole for place in block.places for each in thin_matrices(block, place, np.ones(1)))


def closing_elements(layer: Layer, tensor: FloatArray) -> FloatArray | None:
    """Elements on one tensor rank of the factor that a layer's last product multiplies; None where it is a whole
    matrix."""
    last = "mixer.output" if layer.transform is None else "transform.down"
    found = next((each for each in layer.ranks if each.name == last), None)
    return None if found is None else np.zeros_like(tensor) + found.rank * layer.parts[-1].width


def _thin(layer: Layer, each: MatrixRank, place: str, tensor: FloatArray) -> Thin:
    matrix = next(entry for entry in tensors(replace(layer, ranks=())) if entry.name == f"{each.name}.weight")
    halves = tuple(factored([matrix], [each]))
    ways = np.where(matrix.divided is None, 1.0, divided_by(matrix, tensor))
    local = sum((half.size / (1.0 if half.divided is None else ways) for half in halves), np.zeros_like(tensor))
    return Thin(
        name=each.name.removeprefix(f"{place}."),
        rank=each.rank,
        tokens=_tokens(layer, each.name),
        parameters=local - matrix.size / ways,
        whole=sum(half.size for half in halves if half.divided is None and matrix.divided is not None),
    )


def _tokens(layer: Layer, name: str) -> float:
    """Of keys and values as many as there are for a query."""
    if isinstance(layer.mixer, Attention) and name in ("mixer.key", "mixer.value"):
        return layer.mixer.keys
    return 1.0


def thin_work(work: PartWork, thin: tuple[Thin, ...]) -> PartWork:
    """`work` with two products in the place of each whose matrix is thin, and a kernel more."""
    if not thin:
        return work
    products = (two for product in work.products for two in _products(product, thin))
    return replace(
        work,
        parameters=work.parameters + sum(each.parameters for each in thin),
        products=tuple(products),
        kernels=work.kernels + float(len(thin)),
    )


def _products(product: Product, thin: tuple[Thin, ...]) -> Iterator[Product]:
    inside = [each for each in thin if each.name in product.of]
    if len(inside) < len(product.of) or not inside:
        yield replace(product, count=product.count - float(len(inside)))
    for each in inside:
        between = np.zeros_like(product.m) + each.rank
        yield replace(product, n=between, count=1.0)
        yield replace(product, k=between, count=1.0)


def thin_kept(kept: Kept, thin: tuple[Thin, ...], sizes: Sizes) -> Kept:
    """`kept` with the features between two factors, which the gradient of U alone reads."""
    if not thin:
        return kept
    between = sizes.itemsize * sizes.tokens * sum(each.rank * each.tokens for each in thin)
    return replace(
        kept,
        saved=kept.saved + between,
        fed=kept.fed + between,
        waits=kept.waits + 2.0 * between,
        copied=kept.copied + sum(each.parameters for each in thin),
    )
