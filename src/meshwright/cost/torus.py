"""Groups on a torus: how many of a device's links lead to the others of a group, and how many hops away they are.

Ranks fill whole sides one after the other, as JAX lays the axes of a mesh (jax/experimental/mesh_utils.py); a ring
around every whole side carries its part at once (How to Scale Your Model, jax-ml.github.io/scaling-book).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Lying:
    """Of groups: the share of a device's links that rings use, and all-to-alls; hops that both take; all (rows,)."""

    rings: FloatArray
    scattered: FloatArray
    hops: FloatArray


def torus_sides(devices: int, dims: int) -> tuple[int, ...]:
    """The sides of a torus of so many devices, the shortest first, as even as divisors allow."""
    if dims == 1:
        return (devices,)
    most = round(devices ** (1.0 / dims) + 1e-9)
    least = next(side for side in range(max(most, 1), 0, -1) if devices % side == 0)
    return tuple(sorted((least, *torus_sides(devices // least, dims - 1))))


def lie(link: Link, ranks: FloatArray, *, devices: int) -> Lying:
    """Groups of `ranks` on a torus of `devices`.

    A whole side is a ring of two links of a device where its ends are joined, else a line, which is one at its ends; a
    part of a side is a line too, and counts where no side is whole. On a ring of s a byte of an all-to-all goes s / 4
    hops, on a line twice as many, and the longest side decides.
    """
    dims, joined = link.torus or 1, link.wraps or math.inf
    links, longest, hops, rest = (np.zeros_like(ranks), np.zeros_like(ranks), np.zeros_like(ranks), ranks)
    for side in torus_sides(devices, dims):
        taken = np.minimum(rest, side)
        ring = (taken == side) & (side >= joined) & (side > 1)
        along = np.where(ring, 0.5, 1.0) * taken
        links = links + np.where(ring, 2.0, np.where((taken > 1.0) & ((taken == side) | (links == 0.0)), 1.0, 0.0))
        longest = np.maximum(longest, np.where(taken > 1.0, along, 0.0))
        hops = hops + np.where(taken > 1.0, np.ceil(along), 0.0)
        rest = np.maximum(rest / side, 1.0)
    rings = np.maximum(links, 1.0) / (2.0 * dims)
    return Lying(rings=rings, scattered=np.minimum(rings, 2.0 / dims / np.maximum(longest, 1.0)), hops=hops)
