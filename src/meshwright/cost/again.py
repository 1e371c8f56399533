"""Seconds of what backward does again of a block: a whole forward, the scores, or chosen products."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from meshwright.cost.compute import PassSeconds
from meshwright.cost.mixture_work import MIXTURE
from meshwright.cost.operators import FEED_FORWARD
from meshwright.cost.repeated import OPERATORS, SCORES, Repeated
from meshwright.cost.second_products import second_products
from meshwright.cost.software import Software
from meshwright.cost.table import BoolArray
from meshwright.cost.waits import Timed
from meshwright.cost.work import FloatArray, PartWork, Product

Flops = FloatArray | float
_RAISE = ("kv_up", "query_up")


def scores(passes: Iterable[PassSeconds], software: Software) -> Iterable[FloatArray]:
    """Seconds of every part's scores forward, where they are run again."""
    return (part.core for part in passes) if Repeated.SCORES in software.repeats else ()


def products_again(
    works: tuple[PartWork, ...], seconds: Callable[[PartWork], PassSeconds], software: Software
) -> list[FloatArray]:
    """Seconds of the products that selective recompute runs again, part by part, with the work between them.

    Norms and activations alone are computed again for nothing, and so is what experts are sent.
    """
    if software.repeats <= SCORES:
        return []
    found = []
    for part, chosen in _chosen(works, software):
        if chosen:
            whole = software.repeats == OPERATORS or part.name in (FEED_FORWARD, MIXTURE)
            told = seconds(replace(part, products=chosen, traffic=part.traffic if whole else 0.0))
            found.append(told.forward - (0.0 if part.scan is not None else told.core))
    return found


def _chosen(works: tuple[PartWork, ...], software: Software) -> Iterable[tuple[PartWork, tuple[Product, ...]]]:
    if Repeated.SECOND_PRODUCTS in software.repeats:
        return second_products(works)[1]
    return ((part, _chosen_of(part, software)) for part in works)


def _chosen_of(part: PartWork, software: Software) -> tuple[Product, ...]:
    """Of `part` the products that run again: what stops early leaves out the last one, whose result nothing reads."""
    repeats = software.repeats

    def inside(one: Product, last: str) -> bool:
        return not (software.stops_early and last in one.of)

    if part.name == FEED_FORWARD:
        return tuple(one for one in part.products if inside(one, "down")) if Repeated.DENSE in repeats else ()
    if part.name != MIXTURE:
        raised = Repeated.LATENTS in repeats
        return tuple(one for one in part.products if raised and any(name in _RAISE for name in one.of))
    shared = [one for one in part.products if any(name.startswith("shared.") for name in one.of)]
    kept = [one for one in shared if Repeated.SHARED in repeats and inside(one, "shared.down")]
    experts = part.products[1:2] if software.stops_early else part.products[1:3]
    return (*(experts if Repeated.EXPERTS in repeats else ()), *kept)


def flops_again(works: tuple[PartWork, ...], software: Software) -> tuple[list[Flops], list[Flops], list[Flops]]:
    """FLOPs of a forward that is run again, of its last product, and of what selective recompute chooses."""
    cores: list[Flops] = [part.score_flops * part.heaviest for part in works]
    whole = [*cores, *(one.most_flops for part in works for one in part.products)]
    last: list[Flops] = [one.most_flops for one in works[-1].products[-1:]]
    chosen = cores if Repeated.SCORES in software.repeats else []
    if Repeated.SECOND_PRODUCTS in software.repeats:
        chosen = [part.score_flops for part in works if part.scan is not None]
    if not software.repeats <= SCORES:
        chosen = [*chosen, *(one.most_flops for _, part in _chosen(works, software) for one in part)]
    return whole, last, chosen


def again(whole: Timed, chosen: FloatArray, *, full: BoolArray, selective: BoolArray) -> Timed:
    """What backward does again: a forward, or what of it is `chosen`."""
    work = np.where(full, whole.work, np.where(selective, chosen, 0.0))
    return Timed(work=work, stall=np.where(full, whole.stall, 0.0))
