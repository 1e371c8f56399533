"""Closed forms of the activations that a pipeline rank holds at once."""

from __future__ import annotations

import numpy as np

from meshwright.cost.pipeline_ranks import Shape
from meshwright.cost.table import SCHEDULES, BoolArray, IntArray
from meshwright.cost.work import FloatArray
from meshwright.schedule.program import Program
from meshwright.spec.plan import ScheduleKind as Kind


def held(
    shape: Shape, *, first: FloatArray, last: FloatArray, total: FloatArray, waits: FloatArray | None = None
) -> FloatArray:
    """The most that a rank holds at once of what each microbatch leaves on its stages; all of shape (rows, ranks).

    gpipe and breadth-first hold every microbatch, 1f1b p - rank of them, seq1f1b of k slices (p - rank - 1 + k) / k,
    interleaved what Megatron's warm-up starts, H1 p and H2 2p - 1 of them, of which as many as are not on their way
    down and up are between the halves of their backwards, where `waits` is left of each; V shapes as many of the first
    stage as are on their way down and up, and of the last as are on their way up. Of tables they are counted. Exact
    where a rank's stages between the first and the last are alike.
    """
    microbatches, pipeline = shape.microbatches[:, None], shape.pipeline[:, None]
    slices = np.ones_like(microbatches) if shape.slices is None else shape.slices[:, None]
    behind = pipeline - shape.rank
    found, left = microbatches * total, total if waits is None else waits
    one = np.minimum((behind + slices - 1.0) / slices, microbatches) * total
    found = np.where(_mask(shape, Kind.ONE_F_ONE_B, Kind.SEQUENCE_1F1B), one, found)
    for kind, depth in ((Kind.ZERO_BUBBLE_H1, 1.0), (Kind.ZERO_BUBBLE_H2, 2.0)):
        here = _mask(shape, kind)
        if here.any():
            deep = np.minimum(depth * (pipeline - 1.0) + 1.0, microbatches)
            whole = np.minimum(depth * (behind - 1.0) + 1.0, deep)
            found = np.where(here, whole * total + (deep - whole) * left, found)
    looped = shape.interleaved
    if looped.size:
        found[looped] = shape.live.most(first=first[looped], last=last[looped], total=total[looped])
    for row, program in shape.tables.items():
        part = np.divide(left[row], total[row], out=np.ones_like(total[row]), where=total[row] > 0.0)
        found[row] = _counted(program, shape.rank[row], first=first[row], last=last[row], total=total[row], left=part)
    if not _mask(shape, Kind.ZERO_BUBBLE_V, Kind.DUAL_PIPE_V).any():
        return found
    down, up = pipeline + behind, shape.rank + 1.0
    rising = np.minimum(down - 1.0, microbatches) * first + np.minimum(up, microbatches) * last
    going = np.minimum(down, microbatches) * first + np.minimum(up - 1.0, microbatches) * last
    found = np.where(_mask(shape, Kind.ZERO_BUBBLE_V), np.maximum(rising, going), found)
    return np.where(_mask(shape, Kind.DUAL_PIPE_V), down * first + up * last, found)


def waiting(
    shape: Shape, *, first: FloatArray, last: FloatArray, first_waits: FloatArray, last_waits: FloatArray
) -> FloatArray:
    """What ranks of V shapes hold when most of their microbatches are between the halves of their backwards: `first` of
    each that is on its way forward, and what a microbatch leaves there of either stage; zeros of other ranks.

    Of zb-v's rank r all that are on their way up wait, on both stages, and of dualpipe-v's every other one. Or one
    alone waits when as many as ever are on their way: what it has computed again is more than it kept before.
    """
    microbatches, rank = shape.microbatches[:, None], shape.rank
    ahead = shape.pipeline[:, None] - 1.0 - rank
    up = np.where(_mask(shape, Kind.ZERO_BUBBLE_V), rank + 1.0, np.floor(rank / 2.0) + 1.0)
    down = np.where(_mask(shape, Kind.ZERO_BUBBLE_V), rank, np.floor((rank + 1.0) / 2.0))
    left = np.minimum(up, microbatches) * first_waits + np.minimum(down, microbatches) * last_waits
    found = np.minimum(ahead, microbatches) * first + left
    alone = np.minimum(2.0 * ahead + 1.0, microbatches) * first + last_waits
    found = np.where(rank == 0.0, np.maximum(found, alone), found)
    down, turned = np.minimum(2.0 * ahead + rank + 2.0, microbatches), np.minimum(rank, microbatches)
    most = (down - 1.0) * first + turned * last + first_waits
    found = np.where(first_waits > first, np.maximum(found, most), found)
    return np.where(_mask(shape, Kind.ZERO_BUBBLE_V, Kind.DUAL_PIPE_V), found, 0.0)


def waits_last(shape: Shape) -> BoolArray:
    """Ranks of V shapes of which at most one microbatch waits on a stage, the last one."""
    alone = np.where(_mask(shape, Kind.ZERO_BUBBLE_V), 1, np.where(_mask(shape, Kind.DUAL_PIPE_V), 2, 0))
    return np.asarray(shape.rank < alone)


def _counted(
    program: Program, ranks: IntArray, *, first: FloatArray, last: FloatArray, total: FloatArray, left: FloatArray
) -> FloatArray:
    """The most that `ranks` hold at once: of each stage from a forward to the backward, the part `left` of it from
    the backward's earlier half to its later one."""
    most = np.zeros(total.shape)
    for place, rank in enumerate(ranks.tolist()):
        row = slice(*program.starts[rank : rank + 2].tolist())
        own, chunk = np.unique(program.stage[row], return_inverse=True)
        sizes = np.full(len(own), (total[place] - first[place] - last[place]) / max(len(own) - 2, 1))
        sizes[0], sizes[-1] = first[place], last[place]
        by_work = np.array([1.0, -1.0, left[place] - 1.0, -left[place]])  # in the order of WORKS
        change = by_work[program.work[row]] * sizes[chunk]
        most[place] = np.cumsum(change).max(initial=0.0)
    return most


def _mask(shape: Shape, *kinds: Kind) -> BoolArray:
    return np.array([kind in kinds for kind in SCHEDULES])[shape.schedule][:, None]
