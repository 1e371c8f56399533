"""Collectives inside a layer beside those of the tensor axis: keys and values over context ranks, tokens to experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.cost.compute import PassSeconds
from meshwright.cost.network import Linear
from meshwright.cost.table import EXCHANGES, PlanTable
from meshwright.cost.work import FloatArray, PartWork
from meshwright.spec.plan import ExchangeKind

IndexArray = npt.NDArray[np.intp]
_RING = EXCHANGES.index(ExchangeKind.RING)
_TRADES = 2.0  # before attention and after it
_GRADIENT_SHARE = 2.0  # gradients of keys and values travel in fp32 beside keys and values in half precision


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLinks:
    """Collectives over the context axis, one entry a row.

    `trade` among the ranks that trade tokens for heads; `gather`, `scatter` and one `hop` to the next rank among the
    `outer` runs of such ranks.
    """

    trade: Linear
    gather: Linear
    scatter: Linear
    hop: Linear
    outer: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLinks:
    """Collectives over the grid of experts, one entry a row."""

    dispatch: Linear
    gather: Linear
    scatter: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSeconds:
    """Exposed seconds of one layer's exchange by pass, shape (rows,)."""

    forward: FloatArray
    backward: FloatArray


def context_seconds(
    works: tuple[PartWork, ...],
    passes: list[PassSeconds],
    inverse: IndexArray,
    *,
    table: PlanTable,
    links: ContextLinks,
    hides: FloatArray,
) -> ContextSeconds:
    """What a layer's attention waits for keys and values of other context ranks.

    Around a ring (2310.01889) every step's scores hide the next step's transfer as far as they last; backward passes
    keys and values on again with their gradients. Gathered (2407.21783) they come before the scores, and gradients
    are scattered after them. Ranks that trade tokens for heads (2309.14509) do so before and after. `hides` scales
    seconds of work to those of the row.
    """
    if not (table.context > 1).any():
        zeros = np.zeros(len(table))
        return ContextSeconds(forward=zeros, backward=zeros)
    passed, traded = (_rows((getattr(p, name) for p in works), inverse) for name in ("circulated", "traded"))
    core, core_backward = (_rows((getattr(p, n) for p in passes), inverse) * hides for n in ("core", "core_backward"))
    steps = np.maximum(links.outer - 1.0, 0.0)
    several = links.outer > 1.0

    def ring(sent: FloatArray, work: FloatArray) -> FloatArray:
        return steps * np.maximum(links.hop.seconds(sent) - work / np.maximum(links.outer, 1.0), 0.0)

    whole = passed * links.outer
    gather, scatter = links.gather.seconds(whole), links.scatter.seconds(_GRADIENT_SHARE * whole)
    rings = table.exchange == _RING
    forward = np.where(rings, ring(passed, core), gather)
    backward = np.where(rings, ring((1.0 + _GRADIENT_SHARE) * passed, core_backward), gather + scatter)
    trades = np.where(traded > 0.0, links.trade.seconds(traded, calls=_TRADES), 0.0)
    attends = several & (passed > 0.0)
    return ContextSeconds(
        forward=trades + np.where(attends, forward, 0.0), backward=trades + np.where(attends, backward, 0.0)
    )


def expert_seconds(works: tuple[PartWork, ...], inverse: IndexArray, *, links: ExpertLinks) -> FloatArray:
    """Seconds one way of a pass and back: tokens to their experts, gathered by the ranks that divide them, and back.

    Backward takes as long: gradients go the same ways (2504.14960).
    """
    if not any(np.any(part.dispatched) for part in works):
        return np.zeros(len(inverse))
    sent, whole = (_rows((getattr(part, name) for part in works), inverse) for name in ("dispatched", "regathered"))
    there = links.dispatch.seconds(sent, calls=1.0)
    found = 2.0 * there + links.gather.seconds(whole) + links.scatter.seconds(whole)
    return np.where(sent > 0.0, found, 0.0)


def _rows(values: Iterable[FloatArray | float], inverse: IndexArray) -> FloatArray:
    """The sum of values by combination, row by row."""
    total = sum(values, 0.0)
    return np.full(len(inverse), total) if np.ndim(total) == 0 else np.asarray(total)[inverse]
