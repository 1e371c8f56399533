"""Norms and scales of a layer as work: what reads and writes features and multiplies no matrix."""

from __future__ import annotations

from meshwright.cost.work import PartWork, Sizes
from meshwright.spec.model import Layer, Mixer, Norm, NormKind, Transform

NORM = "norm"


def norms_work(part: Mixer | Transform, sizes: Sizes) -> list[PartWork]:
    """Before and after `part`."""
    return [norm_work(norm, sizes) for norm in (part.norm, part.post_norm) if norm is not None]


def norm_work(norm: Norm, sizes: Sizes) -> PartWork:
    """Reads and writes its tokens once forward, reads two and writes one backward.

    Written out in fp32 it makes 7 passes forward, squares (2), their mean (1) and products with its inverse root and
    the scale (2 each), and 23 backward, six products (15), two sums (2), a power and what is spread out again (3) and a
    sum of two gradients (3), and casts at both ends.
    """
    elements = sizes.tokens * norm.width / sizes.split
    hidden = elements * sizes.itemsize
    if sizes.composite_norms and norm.kind is NormKind.RMS:
        return PartWork(
            name=NORM,
            parameters=sizes.zeros + norm.parameters,
            traffic=elements * (7.0 * sizes.wide + 2.0 * sizes.casts),
            backward_traffic=elements * (23.0 * sizes.wide + 2.0 * sizes.casts),
            kernels=2.0,
        )
    return PartWork(
        name=NORM,
        parameters=sizes.zeros + norm.parameters,
        traffic=2.0 * hidden,
        backward_traffic=3.0 * hidden,
        kernels=1.0 if norm.kind is NormKind.LAYER else 2.0,
    )


def scale_work(layer: Layer, sizes: Sizes) -> PartWork:
    """What a layer gives times a number: read and written, forward and backward."""
    traffic = 2.0 * sizes.itemsize * sizes.tokens * layer.parts[0].width / sizes.split
    return PartWork(name=NORM, parameters=sizes.zeros, traffic=traffic, backward_traffic=traffic, kernels=2.0)


def norm_parameters(part: Mixer | Transform) -> int:
    """Of the norms before and after `part`."""
    return sum(norm.parameters for norm in (part.norm, part.post_norm) if norm is not None)
