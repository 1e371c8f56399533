"""Collectives inside a layer: features over tensor ranks, keys and values over context ranks, tokens to experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.cost.compute import PassSeconds
from meshwright.cost.network import Linear
from meshwright.cost.software import Software
from meshwright.cost.table import EXCHANGES, BoolArray, PlanTable
from meshwright.cost.work import FloatArray, PartWork, Sizes
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
    """Collectives over the grid of experts, one entry a row; `forward` hands a token on inside its node.

    The experts of a group lie on `nodes` nodes, or racks where devices of a rack reach each other as in one node.
    """

    dispatch: Linear
    forward: Linear
    nodes: FloatArray
    gather: Linear
    scatter: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLinks:
    """Collectives over the tensor axis, one entry a row."""

    reduce: Linear
    gather: Linear
    scatter: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLinks:
    tensor: TensorLinks
    context: ContextLinks
    experts: ExpertLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Seconds of one block's collectives by pass, those of context ranks that scores do not hide; shape (rows,).

    `tensor_bytes` are of all tensors that tensor ranks exchange in both passes.
    """

    tensor_forward: FloatArray
    tensor_backward: FloatArray
    context_forward: FloatArray
    context_backward: FloatArray
    expert_forward: FloatArray
    expert_backward: FloatArray
    tensor_bytes: FloatArray

    @property
    def forward(self) -> FloatArray:
        return self.tensor_forward + self.context_forward + self.expert_forward

    @property
    def backward(self) -> FloatArray:
        return self.tensor_backward + self.context_backward + self.expert_backward

    def repeated(self, *, full: BoolArray, scores: BoolArray) -> Exchanged:
        """With what backward exchanges again: all of forward where it is `full`, keys and values where `scores`."""
        again = full | scores
        return replace(
            self,
            tensor_backward=self.tensor_backward + np.where(full, self.tensor_forward, 0.0),
            context_backward=self.context_backward + np.where(again, self.context_forward, 0.0),
            expert_backward=self.expert_backward + np.where(full, self.expert_forward, 0.0),
        )


def exchange_seconds(
    works: tuple[PartWork, ...],
    passes: list[PassSeconds],
    table: PlanTable,
    *,
    hidden: FloatArray,
    sizes: Sizes,
    inverse: IndexArray,
    links: LayerLinks,
    software: Software,
    hides: FloatArray,
) -> Exchanged:
    """What the exchanges of all parts of a block take together.

    `hidden` is bytes of the whole hidden features, one entry a combination; `hides` scales seconds of work to those of
    the row.
    """
    tensor = _tensor_seconds(
        works, table, hidden=hidden[inverse], statistics=(4.0 * sizes.tokens)[inverse], inverse=inverse, links=links
    )
    context_forward, context_backward = _context_seconds(
        works, passes, inverse, table=table, links=links.context, hides=hides
    )
    experts = _expert_seconds(works, inverse, links=links.experts, once=software.dispatches_once)
    windows = [_rows((getattr(p, way) for p in passes), inverse) * hides for way in ("forward", "backward")]
    hidden_behind = windows if software.hides_experts else [np.zeros_like(experts)] * 2
    there, back = (np.maximum(experts - window, 0.0) for window in hidden_behind)
    return Exchanged(
        tensor_forward=tensor[0],
        tensor_backward=tensor[1],
        tensor_bytes=tensor[2],
        context_forward=context_forward,
        context_backward=context_backward,
        expert_forward=there,
        expert_backward=back,
    )


def _tensor_seconds(
    works: tuple[PartWork, ...],
    table: PlanTable,
    *,
    hidden: FloatArray,
    statistics: FloatArray,
    inverse: IndexArray,
    links: LayerLinks,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds forward and backward over the tensor axis, and bytes of all tensors exchanged."""
    over = links.tensor
    whole, gather, scatter = (link.seconds(hidden) for link in (over.reduce, over.gather, over.scatter))

    def count(name: str) -> FloatArray:
        return _rows((getattr(part.exchanges, name) * part.exchanged for part in works), inverse)

    split = table.sequence_parallel
    gathers, scatters, small = count("gathers_forward"), count("scatters_forward"), count("small")
    back_gathers, back_scatters = count("gathers_backward"), count("scatters_backward")
    reduced, back_reduced = count("forward"), count("backward")
    forward = np.where(split, gathers * gather + scatters * scatter, reduced * whole)
    backward = np.where(split, back_gathers * gather + back_scatters * scatter, back_reduced * whole)
    number = np.where(split, gathers + scatters + back_gathers + back_scatters, reduced + back_reduced)
    moved = np.where(table.tensor > 1, number * hidden + small * statistics, 0.0)
    return forward + small * over.reduce.seconds(statistics), backward, moved


def _context_seconds(
    works: tuple[PartWork, ...],
    passes: list[PassSeconds],
    inverse: IndexArray,
    *,
    table: PlanTable,
    links: ContextLinks,
    hides: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """What a layer's attention waits for keys and values of other context ranks, forward and backward.

    Around a ring (2310.01889) every step's scores hide the next step's transfer as far as they last; backward passes
    keys and values on again with their gradients. Gathered (2407.21783) they come before the scores, and gradients
    are scattered after them. Ranks that trade tokens for heads (2309.14509) do so before and after.
    """
    if not (table.context > 1).any():
        return np.zeros(len(table)), np.zeros(len(table))
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
    return trades + np.where(attends, forward, 0.0), trades + np.where(attends, backward, 0.0)


def _expert_seconds(works: tuple[PartWork, ...], inverse: IndexArray, *, links: ExpertLinks, once: bool) -> FloatArray:
    """Seconds one way of a pass and back: tokens to their experts, gathered by the ranks that divide them, and back.

    Backward takes as long: gradients go the same ways (2504.14960). A token sent `once` to a node is handed on there:
    of n nodes that k experts are drawn from evenly, n (1 - (1 - 1/n)^k) hold one of them.
    """
    if not any(np.any(part.dispatched) for part in works):
        return np.zeros(len(inverse))
    sent, whole = (_rows((getattr(part, name) for part in works), inverse) for name in ("dispatched", "regathered"))
    there = links.dispatch.seconds(sent, calls=1.0)
    if once:
        copies = max(part.copies for part in works)
        met = links.nodes * (1.0 - (1.0 - 1.0 / links.nodes) ** copies) / copies
        handed = links.dispatch.seconds(sent * met) + links.forward.seconds(sent)
        there = np.where(links.nodes > 1.0, np.minimum(there, handed), there)
    found = 2.0 * there + links.gather.seconds(whole) + links.scatter.seconds(whole)
    return np.where(sent > 0.0, found, 0.0)


def _rows(values: Iterable[FloatArray | float], inverse: IndexArray) -> FloatArray:
    """The sum of values by combination, row by row."""
    total = sum(values, 0.0)
    return np.full(len(inverse), total) if np.ndim(total) == 0 else np.asarray(total)[inverse]
