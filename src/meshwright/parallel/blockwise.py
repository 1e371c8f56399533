"""Blockwise attention: the queries of this rank meet the keys and values of every rank of its group, tile by tile.

Outputs of tiles are joined by their log-sum-exp (online softmax; Ring attention, 2310.01889). Backward lets keys and
values come by again, with the gradients that gather on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.cost.token_layouts import IntArray
from meshwright.nn.attention import WIDE_LENGTH
from meshwright.parallel.kernels_compat import Scores, kernel
from meshwright.parallel.tiles import Cover, Tile
from meshwright.parallel.travel import Returns, Travel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A tile where it is computed: of a masked one `low` and `high` (queries, 1) are on the device."""

    queries: slice
    keys: slice
    causal: bool = False
    low: Tensor | None = None
    high: Tensor | None = None


def pieces(tiles: Sequence[Tile], *, device: torch.device) -> tuple[Piece, ...]:
    """Tiles brought to `device` once, for as many products as they serve."""

    def brought(edge: IntArray | None) -> Tensor | None:
        return None if edge is None else torch.from_numpy(edge).to(device)[:, None]

    return tuple(
        Piece(
            queries=tile.queries,
            keys=tile.keys,
            causal=tile.cover is Cover.CAUSAL,
            low=brought(tile.low),
            high=brought(tile.high),
        )
        for tile in tiles
    )


# For every owner of keys, the pieces of some sequences of the batch each.
Tilings = Sequence[Sequence[tuple[slice, Sequence[Piece]]]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Meeting:
    """How one product of queries and keys is done: what passes keys on, and what each pair of ranks sees."""

    travel: Travel
    tilings: Tilings
    scale: float
    softcap: float | None = None


class BlockwiseAttention(torch.autograd.Function):
    """(b, heads, s, value_dim) from q (b, heads, s, d), k (b, kv_heads, s, d), v (b, kv_heads, s, value_dim).

    `sinks` (heads,) is a score of each head that takes no value, or None.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, meeting: Meeting) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
        for owner, block in meeting.travel.passing(_packed(k, v)):
            keys, values = _unpacked(block, k, v)
            for rows, tiles in meeting.tilings[owner]:
                for tile in tiles:
                    _meet((q, keys, values), (out, lse), rows, tile, meeting)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.to(wide)[:, None])
            out.mul_(torch.exp(lse - whole)[..., None])
            lse = whole
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, result, lse)
        ctx.meeting = meeting
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        meeting, gradient = ctx.meeting, grads[0]
        wide = torch.promote_types(q.dtype, torch.float32)
        of_queries = torch.zeros_like(q, dtype=wide)
        returns = _go_back((gradient, q, k, v, out, lse), of_queries, meeting)
        of_keys, of_values = _unpacked(returns.home(), k, v)
        of_sinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(wide)[:, None] - lse) * (gradient.to(wide) * out.to(wide)).sum(dim=-1)
            of_sinks = -share.sum(dim=(0, 2)).to(sinks.dtype)
        return of_queries.to(q.dtype), of_keys.to(k.dtype), of_values.to(v.dtype), of_sinks, None


def _go_back(given: tuple[Tensor, ...], of_queries: Tensor, meeting: Meeting) -> Returns:
    """Adds to the gradient `of_queries`; those of keys and values, on their way home. Of `given` the gradient of the
    output, queries, this rank's keys and values, the output and its log-sum-exp."""
    gradient, q, k, v, out, lse = given
    returns = meeting.travel.returning(of_queries.dtype)
    for owner, block in meeting.travel.passing(_packed(k, v)):
        met = (gradient, q, *_unpacked(block, k, v), out, lse)
        sums = (of_queries, *_unpacked(returns.room(owner, block), k, v))
        for rows, tiles in meeting.tilings[owner]:
            for tile in tiles:
                _meet_again(met, sums, rows, tile, meeting)
        returns.leave(owner)
    return returns


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one flat block, so that they travel together."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _unpacked(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of `block` in the shapes of k and v."""
    keys, values = block.split((k.numel(), v.numel()))
    return keys.view(k.shape), values.view(v.shape)


def _meet(
    given: tuple[Tensor, Tensor, Tensor], sums: tuple[Tensor, Tensor], rows: slice, tile: Piece, meeting: Meeting
) -> None:
    """Adds to the output and log-sum-exp `sums` what a tile of `rows` gives; nothing of it outlives the call."""
    q, keys, values = given
    place = (rows, slice(None), tile.queries)
    out, lse = (total[place] for total in sums)
    _join(out, lse, *_tile_forward(q[place], keys[rows], values[rows], tile, meeting))


def _meet_again(
    given: tuple[Tensor, ...], sums: tuple[Tensor, ...], rows: slice, tile: Piece, meeting: Meeting
) -> None:
    """As `_meet`, of backward: adds to the gradients `sums` of queries, keys and values."""
    gradient, q, keys, values, out, lse = given
    place, held = (rows, slice(None), tile.queries), (rows, slice(None), tile.keys)
    found = _tile_backward(gradient[place], q[place], keys[rows], values[rows], out[place], lse[place], tile, meeting)
    for total, part in zip((sums[0][place], sums[1][held], sums[2][held]), found, strict=True):
        total += part


def _tile_forward(q: Tensor, keys: Tensor, values: Tensor, tile: Piece, meeting: Meeting) -> tuple[Tensor, Tensor]:
    q, k, v = _widened(q, keys[:, :, tile.keys], values[:, :, tile.keys])
    scores = _scores(tile, meeting, q.device)
    return kernel(q, k, v, scores).forward(q, k, v, scores)


def _tile_backward(
    gradient: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Piece,
    meeting: Meeting,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _widened(q, keys[:, :, tile.keys], values[:, :, tile.keys])
    scores = _scores(tile, meeting, q.device)
    return kernel(q, k, v, scores).backward(gradient.to(q.dtype), q, k, v, out.to(q.dtype), lse, scores)


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As on one device: half-precision kernels of processors gain nothing on few keys."""
    if q.device.type == "cpu" and q.itemsize < 4 and k.shape[2] <= WIDE_LENGTH:
        return q.float(), k.float(), v.float()
    return q, k, v


def _scores(tile: Piece, meeting: Meeting, device: torch.device) -> Scores:
    mask = None
    if tile.low is not None and tile.high is not None:
        places = torch.arange(tile.keys.stop - tile.keys.start, device=device)
        mask = (places >= tile.low) & (places < tile.high)
    return Scores(scale=meeting.scale, softcap=meeting.softcap, causal=tile.causal, mask=mask)


def _join(out: Tensor, lse: Tensor, more: Tensor, its: Tensor) -> None:
    """`out` and `lse` of the keys seen so far and of those of `more`, in place."""
    its = its.to(lse.dtype)
    whole = torch.logaddexp(lse, its)
    # A row that has seen nothing yet is -inf minus -inf here, and weighs nothing.
    out.mul_(torch.exp(lse - whole).nan_to_num_(0.0)[..., None])
    out.add_(more * torch.exp(its - whole).nan_to_num_(0.0)[..., None])
    lse.copy_(whole)
