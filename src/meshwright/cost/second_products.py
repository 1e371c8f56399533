"""A policy by operators: of a layer's products it keeps what every second one gives, and runs the others again.

torchtitan's selective recompute (distributed/activation_checkpoint.py, `SelectiveAC`) counts products from the layer's
first and keeps what those with even numbers give, what attention gives, and what experts are sent and send back. It
does not count the router's product, and knows none of a group's, so that those of experts run again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.mixture_work import MIXTURE
from meshwright.cost.operators import ATTENTION
from meshwright.cost.work import FloatArray, PartWork, Product, Sizes
from meshwright.spec.model import Attention, LatentAttention, Layer

_ORDER = ("query_down", "query", "query_up", "gate", "kv_down", "kv_up", "key", "value", "output")
_LAST = ("output", "down", "shared.down")


def second_products(works: tuple[PartWork, ...]) -> tuple[list[Product], list[tuple[PartWork, tuple[Product, ...]]]]:
    """The products of a layer whose results are kept, and those of every part that run again."""
    kept: list[Product] = []
    again: list[tuple[PartWork, tuple[Product, ...]]] = []
    before = 0
    for part in works:
        runs = []
        for one in sorted(part.products, key=_place) if part.name == ATTENTION else part.products:
            if part.name == MIXTURE and not one.of:
                runs.append(one)
                continue
            matrices = max(len(one.of), 1)
            odd = (before + matrices) // 2 - before // 2
            before += matrices
            if odd < matrices:
                kept.append(replace(one, count=one.count * (matrices - odd) / matrices))
            if odd:
                runs.append(replace(one, count=one.count * odd / matrices))
        again.append((part, tuple(runs)))
    return kept, again


def operator_outputs(layer: Layer, works: tuple[PartWork, ...], sizes: Sizes) -> FloatArray:
    """Bytes that the policy keeps of a layer's inside: what is chosen of its products, of attention and of experts."""
    total = sizes.zeros
    for one in second_products(works)[0]:
        divided = sizes.split if any(name in _LAST for name in one.of) else 1.0
        total = total + one.m * one.n * one.count * sizes.itemsize / divided
    for part in works:
        if part.name == ATTENTION and isinstance(layer.mixer, Attention | LatentAttention):
            given = sum((one.m * one.k * one.count for one in part.products if "output" in one.of), sizes.zeros)
            total = total + sizes.itemsize * given + sizes.wide * sizes.tokens * layer.mixer.heads / sizes.tensor
        total = total + np.where(np.asarray(sizes.expert) > 1.0, 2.0 * part.dispatched, 0.0)
    return total


def _place(one: Product) -> int:
    return next((_ORDER.index(name) for name in one.of if name in _ORDER), len(_ORDER))
