"""Collectives inside a layer: features over tensor ranks, keys and values over context ranks, tokens to experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.cost.block_bytes import width_of
from meshwright.cost.compute import PassSeconds
from meshwright.cost.expert_handling import ExpertHandling
from meshwright.cost.grid_rows import on_grids
from meshwright.cost.met import Routed, met
from meshwright.cost.network import Linear
from meshwright.cost.overlap import Contention, Traffic, Way, late_beside
from meshwright.cost.scales import with_scales
from meshwright.cost.shared_features import TensorLinks, tensor_seconds
from meshwright.cost.software import Software
from meshwright.cost.table import DISPATCHES, EXCHANGES, BoolArray, PlanTable
from meshwright.cost.work import FloatArray, PartWork, Sizes
from meshwright.spec.blocks import Block
from meshwright.spec.exchange import ExchangeKind
from meshwright.spec.plan import Dispatch

IndexArray = npt.NDArray[np.intp]
_RING = EXCHANGES.index(ExchangeKind.RING)
_GATHERED = DISPATCHES.index(Dispatch.ALL_GATHER)
_TRADES = 2.0  # before attention and after it
_GRADIENT_BYTES = 4.0  # at the least: gradients of keys and values add up on their way


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLinks:
    """Collectives over the context axis, one entry a row.

    `trade` among the ranks that trade tokens for heads; `gather`, `scatter` and one `hop` to the next rank among the
    `outer` runs of such ranks. Features go the way of those that trade, and keys and values that of `runs`.
    """

    trade: Linear
    gather: Linear
    scatter: Linear
    hop: Linear
    outer: FloatArray
    traders: Way
    runs: Way


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLinks:
    """Collectives over the grid of experts, one entry a row; `forward` hands a token on inside its node.

    `dispatch`, or `gather_tokens` and `scatter_tokens`, are among ranks that hold different experts, `gather` and
    `scatter` among those that divide the same ones. The experts of a group lie on `nodes` nodes, or racks where
    devices of a rack reach each other as in one node.
    """

    dispatch: Linear
    forward: Linear
    nodes: FloatArray
    gather: Linear
    scatter: Linear
    gather_tokens: Linear
    scatter_tokens: Linear
    way: Way


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLinks:
    """Collectives inside a layer; `grid` those along each direction of a square or cube of tensor ranks, () where no
    row has one; `contention` between them and work, and to the device's other traffic."""

    tensor: TensorLinks
    grid: tuple[TensorLinks, ...]
    context: ContextLinks
    experts: ExpertLinks
    contention: Contention


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Whole seconds of the collectives inside one block in one pass, hidden or not; arrays of shape (rows,).

    `tensor` and `context` are waited for; `beside` products run tensor ranks' others, and delay them by `held_up`; a
    `ring` runs beside the scores and delays them by `late`. `experts` are waited for unless the software hides them.
    """

    tensor: Traffic
    beside: Traffic
    held_up: FloatArray
    context: Traffic
    ring: Traffic
    late: FloatArray
    experts: Traffic

    @property
    def nothing(self) -> Exchanged:
        """No exchange, for as many rows."""
        none, zeros = Traffic.none(self.late), np.zeros_like(self.late)
        return Exchanged(tensor=none, beside=none, held_up=zeros, context=none, ring=none, late=zeros, experts=none)

    def again(self, other: Exchanged, *, full: BoolArray, scores: BoolArray) -> Exchanged:
        """With what is repeated of `other`: all of it where `full`, keys and values where `scores`."""
        keys = full | scores
        return Exchanged(
            tensor=self.tensor + other.tensor.where(full),
            beside=self.beside + other.beside.where(full),
            held_up=self.held_up + np.where(full, other.held_up, 0.0),
            context=self.context + other.context.where(keys),
            ring=self.ring + other.ring.where(keys),
            late=self.late + np.where(keys, other.late, 0.0),
            experts=self.experts + other.experts.where(full),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """Exchanged of both passes and of a forward that is done `again`; `tensor_bytes` are of all tensors that tensor
    ranks exchange in the two passes.
    """

    forward: Exchanged
    again: Exchanged
    backward: Exchanged
    tensor_bytes: FloatArray

    def without_backward(self) -> Exchanges:
        """Those of forward alone."""
        return replace(self, backward=self.backward.nothing, tensor_bytes=0.5 * self.tensor_bytes)

    def repeated(self, *, full: BoolArray, scores: BoolArray) -> Exchanges:
        """With what backward exchanges again: all of forward where it is `full`, keys and values where `scores`."""
        return replace(self, backward=self.backward.again(self.again, full=full, scores=scores))


def exchange_seconds(
    block: Block,
    works: tuple[PartWork, ...],
    passes: list[PassSeconds],
    table: PlanTable,
    *,
    sizes: Sizes,
    inverse: IndexArray,
    links: LayerLinks,
    software: Software,
    hides: FloatArray,
    comes_back: bool = True,
) -> Exchanges:
    """What the exchanges of all parts of a block take together; those of forward alone unless backward `comes_back`.
    `hides` scales seconds of work to those of the row."""
    tensor = tensor_seconds(
        works,
        passes,
        table,
        hidden=(sizes.tokens * width_of(block) * sizes.itemsize)[inverse],
        statistics=(4.0 * sizes.tokens)[inverse],
        inverse=inverse,
        links=links.tensor,
        contention=links.contention,
        software=software,
        hides=hides,
    )
    tensor = on_grids(
        tensor, block, table, links=links.grid, tokens=sizes.tokens[inverse], size=sizes.itemsize[inverse]
    )
    tensor = with_scales(tensor, block, table, links=links.tensor, software=software)
    context = _context_seconds(
        works,
        passes,
        inverse,
        table=table,
        gradients=np.maximum(_GRADIENT_BYTES / sizes.itemsize, 1.0)[inverse],
        links=links.context,
        hides=hides,
        contention=links.contention,
    )
    experts, sent = _expert_seconds(works, inverse, table=table, links=links.experts, handling=software.experts)
    forward, again, backward = (
        Exchanged(
            tensor=features.waits,
            beside=features.beside,
            held_up=features.held_up,
            context=keys.waits,
            ring=keys.ring,
            late=keys.late,
            experts=Traffic.over(experts, links.experts.way, num_bytes=sent),
        )
        for features, keys in (
            (tensor.forward, context[0]),
            (tensor.again, context[0]),
            (tensor.backward, context[1]),
        )
    )
    found = Exchanges(forward=forward, again=again, backward=backward, tensor_bytes=tensor.moved)
    return found if comes_back else found.without_backward()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """What a layer's attention does to have keys and values of other context ranks in one pass; see Exchanged."""

    waits: Traffic
    ring: Traffic
    late: FloatArray


def _context_seconds(
    works: tuple[PartWork, ...],
    passes: list[PassSeconds],
    inverse: IndexArray,
    *,
    table: PlanTable,
    gradients: FloatArray,
    links: ContextLinks,
    hides: FloatArray,
    contention: Contention,
) -> tuple[_Keys, _Keys]:
    """What keys and values of other context ranks take, forward and backward; their `gradients` have so many times
    their bytes.

    Around a ring (2310.01889) every step's scores hide the next step's transfer as far as they last; backward passes
    keys and values on again, and their gradients behind them in messages of their own. Gathered (2407.21783) they come
    before the scores, and gradients are scattered after them. Ranks that trade tokens for heads (2309.14509) do so
    before and after. Every slice of a microbatch does all this, and brings the keys and values of those before it too.
    """
    if not (table.context > 1).any():
        nothing = Traffic.none(np.zeros(len(table)))
        none = _Keys(waits=nothing, ring=nothing, late=np.zeros(len(table)))
        return none, none
    passed, heads = (_rows((getattr(p, name) for p in works), inverse) for name in ("circulated", "traded"))
    slices = table.slices.astype(np.float64)
    passed = passed * (slices + 1.0) / 2.0
    attends = (links.outer > 1.0) & (passed > 0.0)
    rings = attends & (table.exchange == _RING)
    steps = np.maximum(links.outer - 1.0, 0.0)
    whole = passed * links.outer
    gather, scatter = (
        slices * link.seconds(size / slices)
        for link, size in ((links.gather, whole), (links.scatter, gradients * whole))
    )
    trades = np.where(heads > 0.0, slices * links.trade.seconds(heads / slices, calls=_TRADES), 0.0)

    traded = Traffic.over(trades, links.traders, num_bytes=heads)

    def keys(name: str, *, copies: FloatArray | float, messages: float, gathered: FloatArray) -> _Keys:
        """`copies` times the bytes of keys and values travel, so many `messages` a hop."""
        scores = _rows((getattr(p, name) for p in passes), inverse) * hides * steps / np.maximum(links.outer, 1.0)
        hops = steps * slices * links.hop.seconds(copies * passed / slices, calls=messages)
        seconds = np.where(rings, hops, np.where(attends, gathered, 0.0))
        travel = Traffic.over(seconds, links.runs, num_bytes=copies * whole)
        ring = travel.where(rings)
        return _Keys(waits=traded + travel.where(~rings), ring=ring, late=late_beside(ring, scores, contention))

    return (
        keys("core", copies=1.0, messages=1.0, gathered=gather),
        keys("core_backward", copies=1.0 + gradients, messages=2.0, gathered=gather + scatter),
    )


def _expert_seconds(
    works: tuple[PartWork, ...],
    inverse: IndexArray,
    *,
    table: PlanTable,
    links: ExpertLinks,
    handling: ExpertHandling,
) -> tuple[FloatArray, FloatArray]:
    """Seconds and bytes of a pass there and back: tokens to experts, gathered by the ranks that divide them, and back.

    Backward takes as long: gradients go the same ways (2504.14960). A token that is dispatched once goes once to each
    rank that holds an expert of its, and between nodes once to a node, which hands it on (DeepEP). Where all ranks
    gather all tokens, a token travels once, whatever the experts that chose it, and sums are scattered.
    """
    if not any(np.any(part.dispatched) for part in works):
        return np.zeros(len(inverse)), np.zeros(len(inverse))
    sent, whole = (_rows((getattr(part, name) for part in works), inverse) for name in ("dispatched", "regathered"))
    routed = max(works, key=lambda part: part.copies)
    copies, chosen, once = routed.copies, sent, handling.dispatches_once
    if once:
        how = Routed(routed.copies, routed.groups, routed.chosen_groups)
        nodes, ranks = (met(places, how) for places in (links.nodes, np.maximum(table.expert, 1.0)))
        sent = chosen * ranks
    there = links.dispatch.seconds(sent, calls=1.0)
    if once:
        handed = links.dispatch.seconds(chosen * nodes) + links.forward.seconds(sent)
        there = np.where(links.nodes > 1.0, np.minimum(there, handed), there)
    found = 2.0 * there + links.gather.seconds(whole) + links.scatter.seconds(whole)
    gathers = table.dispatch == _GATHERED
    if gathers.any():
        every = chosen / copies * table.expert
        both = every * table.expert_tensor
        gathered = links.gather_tokens.seconds(every) + links.scatter_tokens.seconds(every)
        found = np.where(gathers, gathered + links.gather.seconds(both) + links.scatter.seconds(both), found)
        sent = np.where(gathers, every, sent)
    return np.where(sent > 0.0, found, 0.0), 2.0 * sent


def _rows(values: Iterable[FloatArray | float], inverse: IndexArray) -> FloatArray:
    """The sum of values by combination, row by row."""
    total = sum(values, 0.0)
    return np.full(len(inverse), total) if np.ndim(total) == 0 else np.asarray(total)[inverse]
