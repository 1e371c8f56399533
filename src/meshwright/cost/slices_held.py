"""What slices in flight on a rank hold beside as many mean ones, and the gradients that they leave for earlier keys.

The first slice of a microbatch puts no keys together and the last one most; the last one goes back first. From then on
gradients are there for the keys of all slices before the one that goes back, until it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from meshwright.cost.block_bytes import Holds, SliceBytes
from meshwright.cost.kept_keys import all_joined
from meshwright.cost.pipeline import Shape, held
from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray


@dataclass(frozen=True, slots=True)
class Phase:
    """When a slice goes back, shape (rows, ranks): bytes of all in flight and gradients `beside` those of mean slices,
    and of its `own` kept ones those that are fewer when it has, beside the mean. Not all rows have it `here`."""

    beside: FloatArray
    own: FloatArray
    here: BoolArray


@dataclass(frozen=True, slots=True)
class Sliced:
    """The first slice that goes back, the next one, and the one that does when microbatches are whole but for its own,
    or but for another one."""

    first: Phase
    second: Phase
    again: Phase


def beside_mean(blocks: Sequence[Holds], counts: FloatArray, *, shape: Shape) -> Sliced | None:
    """Of the blocks that are counted, (rows, ranks, kinds + 1); None where no microbatch comes in slices, or where none
    of the blocks says what those have."""
    if shape.slices is None or all(block.bytes.slices is None for block in blocks):
        return None
    slices, ones = shape.slices[:, None], np.ones(counts.shape[:2])
    each = _summed(blocks, counts)
    total = np.broadcast_to(shape.microbatches[:, None] * slices, ones.shape)
    passes = np.rint(held(shape, first=ones, last=ones, total=ones) * slices)
    more, rest = total - passes, np.mod(passes, slices)
    there = np.broadcast_to(slices > 1.0, ones.shape)
    # As long as there are more, another one has gone forward when the next one goes back.
    second = np.where(more > 0.0, passes, passes - 1.0)
    again = np.where(rest > 0.0, rest, slices)
    return Sliced(
        _phase(each, passes, slices, going=slices * ones, here=there),
        _phase(each, second, slices, going=np.maximum(slices - 1.0, 1.0) * ones, here=there),
        _phase(each, passes, slices, going=again, here=there & (more >= np.where(rest > 0.0, slices - rest, slices))),
    )


def _summed(blocks: Sequence[Holds], counts: FloatArray) -> SliceBytes:
    """Of a microbatch on all blocks of a rank, shape (rows, ranks)."""
    found = {field.name: np.zeros(counts.shape[:2]) for field in fields(SliceBytes)}
    for index, block in enumerate(blocks):
        if block.bytes.slices is not None:
            for name, values in found.items():
                values += counts[..., index] * getattr(block.bytes.slices, name)[:, None]
    return SliceBytes(**found)


def _phase(each: SliceBytes, passes: FloatArray, slices: FloatArray, *, going: FloatArray, here: BoolArray) -> Phase:
    """Of `passes` in flight, the first `going` slices of a microbatch and those of the ones after it. The one that goes
    back has its keys until it has, and so it has their gradients, where later ones left any; the last one leaves some.
    """
    whole, part = np.divmod(np.maximum(passes - going, 0.0), slices)
    hand_on, runs = np.maximum(slices - 1.0, 1.0), np.maximum(all_joined(slices), 1.0)
    handed = np.minimum(going, hand_on) + whole * hand_on + np.minimum(part, hand_on)
    joined = all_joined(going) + whole * all_joined(slices) + all_joined(part)
    ends = 1.0 * (going == slices)
    kept = each.handed * handed / hand_on + each.unread * (ends + whole) + each.joined * joined / runs
    kept = kept + each.first * (whole + (going > 0.0) + (part > 0.0))
    mean = (each.handed + each.unread + each.joined + each.first) / slices
    gradients = each.left * np.where(going < slices, going, 0.0) / hand_on
    own = (each.unread - each.left) * ends + np.where(going > 1.0, each.joined * going / runs, each.first)
    return Phase(
        beside=np.where(here, kept + gradients - mean * passes, 0.0),
        own=np.where(here, own - mean, 0.0),
        here=here,
    )
