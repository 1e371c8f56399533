"""Context parallel: every sequence is divided over the context axis, and attention meets the keys of all its ranks.

What a rank holds is said by a layout of tokens (cost.token_layouts) and travels as positions: masks and angles follow
them, so every layout is exact. The ranks of the axis read the same sequences; `cut` leaves each its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.cost.token_layouts import IntArray, dealt, document_starts, first_keys, last_keys
from meshwright.nn import Decoder
from meshwright.nn.attention import AttentionCore, Scoring
from meshwright.nn.context import Context
from meshwright.parallel.blockwise import BlockwiseAttention, Meeting, Piece, Tilings, pieces
from meshwright.parallel.mesh import ContextRanks, Mesh
from meshwright.parallel.tiles import seen_runs, tiles
from meshwright.parallel.trade import Traders
from meshwright.parallel.travel import Gather, Ring, Travel
from meshwright.spec.exchange import ExchangeKind, TokenLayout
from meshwright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Who holds what in one pass: `positions` (ranks, slices * s) ascending in each rank, one for each sequence of the
    batch or one for all; `starts`, where documents start, and `ahead`, how many later tokens prefixes see, (length,)
    each, or None. Of several slices the last one is new, and keys of those before are kept."""

    positions: tuple[IntArray, ...]
    starts: tuple[IntArray, ...] | None = None
    ahead: tuple[IntArray, ...] | None = None
    slices: int = 1

    def by_run(self, row: int, *, runs: int) -> IntArray:
        """The positions of sequence `row` that runs of ranks hold between them, (runs, slices, tokens), ascending."""
        rows = self.positions[row % len(self.positions)].reshape(runs, -1, self.slices, self.tokens)
        return np.sort(rows.transpose(0, 2, 1, 3).reshape(runs, self.slices, -1), axis=2)

    @property
    def tokens(self) -> int:
        """Of a slice on one rank."""
        return self.positions[0].shape[1] // self.slices

    @property
    def alike(self) -> tuple[slice, ...]:
        """Runs of neighbouring sequences whose documents and prefixes are the same, which one product attends."""
        told = [rows for rows in (self.starts, self.ahead) if rows is not None]
        if not told:
            return (slice(None),)
        count = len(told[0])
        same = [all(np.array_equal(rows[row], rows[row - 1]) for rows in told) for row in range(1, count)]
        edges = [0, *(row for row, equal in enumerate(same, start=1) if not equal), count]
        return tuple(slice(*pair) for pair in pairwise(edges))

    @property
    def new(self) -> tuple[IntArray, ...]:
        """`positions` of the last slice."""
        return tuple(rows[:, -self.tokens :] for rows in self.positions)


class ContextShare:
    """The tokens of one rank of the context axis (a SequenceShare of nn.context)."""

    def __init__(self, plan: Plan, ranks: ContextRanks, *, device: torch.device) -> None:
        self._length, self._layout = plan.sequence_length, plan.exchange.layout
        self._slices = plan.schedule.slices
        self.ranks, self.device = ranks, device
        self._follows = self._layout is TokenLayout.BALANCED
        self._fixed = self._dealt(None, None, slices=self._slices)
        self._at = torch.from_numpy(self._fixed[ranks.rank].copy()).to(device)

    @property
    def length(self) -> int:
        return self._length

    def held(self, context: Context) -> Held:
        """Who holds what in the pass of `context`, worked out once: documents of an accelerator are waited for."""
        if "held" not in context.known:
            slices = context.start * self._slices // self._length + 1
            context.known["held"] = self._held(context.documents, context.ahead, slices=slices)
        found = context.known["held"]
        assert isinstance(found, Held)
        return found

    def positions(self, context: Context) -> Tensor:
        if not self._follows or (context.documents is None and context.ahead is None):
            return self._at.chunk(self._slices)[context.start * self._slices // self._length]
        return self._stacked(self.held(context).new)

    def places(self, context: Context) -> Tensor:
        """Where in the pass of `context` the tokens of all ranks stand, rank by rank, (length,) or (b, length)."""
        if "places" not in context.known:
            rows = [rows.reshape(-1) - context.start for rows in self.held(context).new]
            places = torch.from_numpy(np.stack(rows) if len(rows) > 1 else rows[0]).to(self.device)
            context.known["places"] = places
        return cast(Tensor, context.known["places"])

    def cut(self, batch: Sequence[Tensor], documents: Tensor | None, ahead: Tensor | None) -> tuple[Tensor, ...]:
        """The tokens of this rank, (b, s) of (b, length) each."""
        if not self._follows or (documents is None and ahead is None):
            return tuple(x.index_select(1, self._at) for x in batch)
        places = self._stacked(self._held(documents, ahead, slices=self._slices).positions)
        return tuple(x.gather(1, places) for x in batch)

    def _held(self, documents: Tensor | None, ahead: Tensor | None, *, slices: int) -> Held:
        fixed = (self._fixed[:, : self._fixed.shape[1] * slices // self._slices],)
        if documents is None and ahead is None:
            return Held(positions=fixed, slices=slices)
        starts = None if documents is None else tuple(document_starts(documents.cpu().numpy()))
        further = None if ahead is None else tuple(ahead.cpu().numpy())
        rows = zip(starts or repeat(None), further or repeat(None), strict=False)
        positions = tuple(self._dealt(*row, slices=slices) for row in rows) if self._follows else fixed
        return Held(positions=positions, starts=starts, ahead=further, slices=slices)

    def _stacked(self, positions: Sequence[IntArray]) -> Tensor:
        return torch.from_numpy(np.stack([rows[self.ranks.rank] for rows in positions])).to(self.device)

    def _dealt(self, starts: IntArray | None, ahead: IntArray | None, *, slices: int) -> IntArray:
        ranks, length = self.ranks, self._length * slices // self._slices
        return dealt(
            self._layout,
            length=length,
            ranks=ranks.size,
            starts=starts,
            ahead=ahead,
            traders=ranks.traders,
            slices=slices,
        )


@dataclass(slots=True, kw_only=True)
class ContextAttention:
    """Attention over the context axis (a KeyExchange of nn.attention).

    Neighbouring ranks trade tokens for heads, runs of them meet around a ring or by gathering; either may be one rank.
    """

    share: ContextShare
    kind: ExchangeKind
    _tilings: dict[tuple[int | None, int | None, bool, int], Tilings] = field(default_factory=dict)

    @torch.compiler.disable
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, core: int, scoring: Scoring, context: Context
    ) -> Tensor:
        traders = self._traders(context, q.device)
        if traders is not None:
            q, k, v = traders.heads_for_tokens(q, k, v)
            sinks = None if sinks is None else sinks.chunk(traders.size)[traders.rank]
        meeting = Meeting(
            travel=self._travel(), tilings=self._known(scoring, context), scale=scoring.scale, softcap=scoring.softcap
        )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if context.memory is not None:
            k, v = context.memory.extend(core, k, v)
        out: Tensor = BlockwiseAttention.apply(q, k, v, sinks, meeting)
        out = out.transpose(1, 2)
        return out if traders is None else traders.tokens_for_heads(out)

    def _traders(self, context: Context, device: torch.device) -> Traders | None:
        ranks = self.share.ranks
        if ranks.inner is None:
            return None
        if "traders" not in context.known:
            run = slice(ranks.run * ranks.traders, (ranks.run + 1) * ranks.traders)
            orders = [np.argsort(rows[run].reshape(-1)) for rows in self.share.held(context).new]
            order = np.stack(orders) if len(orders) > 1 else orders[0]
            context.known["traders"] = Traders(
                group=ranks.inner,
                rank=ranks.rank % ranks.traders,
                size=ranks.traders,
                order=torch.from_numpy(order).to(device),
                back=torch.from_numpy(np.argsort(order)).to(device),
            )
        found = context.known["traders"]
        assert isinstance(found, Traders)
        return found

    def _travel(self) -> Travel:
        ranks = self.share.ranks
        if ranks.outer is None or self.kind is ExchangeKind.RING:
            return Ring(group=ranks.outer, rank=ranks.run, size=ranks.runs)
        return Gather(group=ranks.outer, rank=ranks.run, size=ranks.runs)

    def _known(self, scoring: Scoring, context: Context) -> Tilings:
        """Tiles of every pair of ranks: of the run if documents do not differ, else of the pass."""
        key = (scoring.window, scoring.chunk, scoring.prefix, context.start)
        if context.documents is None and context.ahead is None:
            if key not in self._tilings:
                self._tilings[key] = self._tiled(self.share.held(context), scoring)
            return self._tilings[key]
        if key not in context.known:
            context.known[key] = self._tiled(self.share.held(context), scoring)
        return cast(Tilings, context.known[key])

    def _tiled(self, held: Held, scoring: Scoring) -> Tilings:
        runs, own = self.share.ranks.runs, self.share.ranks.run
        found: list[list[tuple[slice, Sequence[Piece]]]] = [[] for _ in range(runs)]
        for rows in held.alike:
            row = rows.start or 0
            positions = held.by_run(row, runs=runs)
            queries = positions[own, -1]
            starts = None if held.starts is None else held.starts[row]
            ahead = held.ahead[row] if held.ahead is not None and scoring.prefix else None
            first = first_keys(queries, window=scoring.window, chunk=scoring.chunk, starts=starts)
            last = last_keys(queries, window=scoring.window, chunk=scoring.chunk, ahead=ahead)
            for owner in range(runs):
                seen = tiles(*seen_runs(positions[owner].reshape(-1), first=first, last=last))
                if seen:
                    found[owner].append((rows, pieces(seen, device=self.share.device)))
        return found


def share_of(plan: Plan, mesh: Mesh, *, device: torch.device) -> ContextShare | None:
    """The tokens of this rank; None where the plan has no context axis."""
    return None if mesh.context is None else ContextShare(plan, mesh.context, device=device)


def divide_sequences(unit: nn.Module, share: ContextShare, *, kind: ExchangeKind) -> None:
    """Every attention under `unit` meets the keys of all ranks of the context axis."""
    cores = [module for module in unit.modules() if isinstance(module, AttentionCore)]
    exchange = ContextAttention(share=share, kind=kind)
    for core in cores:
        core.exchange = exchange
    if isinstance(unit, Decoder):
        unit.share = share
