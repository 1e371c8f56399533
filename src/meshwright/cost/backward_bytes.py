"""What a block's backward has at its heaviest moments beside all that the block keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.cost.kept_part import Kept
from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import Block, Layer

# Queries, keys and values are products of one tensor; the gradients that two of them give it are summed to a third.
_SUMMED = 3.0


@dataclass(frozen=True, kw_only=True)
class _Backward:
    """The backward of a block of `parts` in forward order, whose cores are computed `again` or were kept. What it keeps
    goes part by part or, where it `stays`, not before all of it is done: bytes of shape (combinations,)."""

    parts: tuple[Kept, ...]
    block: Block
    sizes: Sizes
    again: bool = False
    stays: bool = False

    @property
    def moments(self) -> dict[str, FloatArray]:
        """By the names of BlockBytes."""
        return {
            "working": self._most(),
            "half": self._most_of_half(),
            "ending": self._at_last_product(),
            "given": self._at_experts_end(),
            "giving": self._at_experts_end() + sum(part.giving for part in self.parts),
            "mixing": self._at_core(),
            "opening": self._at_first_products(),
            "making": self._in_experts("making"),
            "inside": self._in_experts("inside"),
            "going": self._in_experts("going"),
        }

    def _core(self, part: Kept) -> FloatArray | float:
        return part.core if self.again else 0.0

    def _in_part(self, part: Kept) -> FloatArray | float:
        """The most of one part's backward, beside all that it kept or made again."""
        if self.stays:
            return np.maximum(part.working + part.late, part.turning) + self._core(part)
        return np.maximum(part.working, part.turning - part.done) + self._core(part)

    def _gone(self, part: Kept) -> FloatArray | float:
        """Of what is kept that is gone when backward comes to the part before."""
        return 0.0 if self.stays else part.saved - self._core(part)

    def _most(self) -> FloatArray:
        """The most over the parts: backward comes to one when what those after it kept is gone."""
        most, gone = self.sizes.zeros, self.sizes.zeros
        for part in reversed(self.parts):
            most = np.maximum(most, self._in_part(part) - gone)
            gone = gone + self._gone(part)
        return most

    def _most_of_half(self) -> FloatArray:
        """As above of the half that gives its input's gradient, which what the other half reads outlasts."""
        most, gone = self.sizes.zeros, self.sizes.zeros
        for part in reversed(self.parts):
            most = np.maximum(most, part.working + part.late + self._core(part) - gone)
            gone = gone + self._gone(part) - part.waits
        return most

    def _at_last_product(self) -> FloatArray:
        """What norms after it kept is not gone yet."""
        at = (part.ending for part in reversed(self.parts) if np.any(part.ending))
        found = self.sizes.zeros + next(at, 0.0)
        return np.maximum(found, 0.0) if self.stays else found

    def _at_experts_end(self) -> FloatArray:
        """When experts have given all gradients, those of what they read too, and the rest of the block none."""
        given = self.sizes.zeros
        for part in self.parts:
            given = given + part.given
        return np.maximum(given, 0.0) if self.stays else given

    def _at_core(self) -> FloatArray:
        """At the core of the mixer, when nothing is left of the transform; nothing where either is missing."""
        place = self._mixer
        if place is None:
            return self.sizes.zeros
        found = self.sizes.zeros + self._in_part(self.parts[place])
        for part in self.parts[place + 1 :]:
            found = found - self._gone(part)
        return found

    def _at_first_products(self) -> FloatArray:
        """At the mixer's first products, when their input and what the norm before them kept are all that is left."""
        place, sizes, block = self._mixer, self.sizes, self.block
        if place is None or not isinstance(block, Layer) or np.any(np.asarray(sizes.grid_dims) > 1.0):
            return sizes.zeros - np.inf
        entering = sizes.itemsize * sizes.tokens * block.parts[0].width
        found = sizes.zeros + _SUMMED * entering
        if self.stays:
            return found
        found = found + entering
        for part in self.parts[place:]:
            found = found - self._gone(part)
        return found

    def _in_experts(self, name: str) -> FloatArray:
        """What the part that has such a moment has in it, when those after it keep nothing; 0 where none has."""
        found = self.sizes.zeros
        for part in reversed(self.parts):
            beside: FloatArray | float = getattr(part, name)
            if np.any(beside):
                return np.asarray(found + beside)
            found = found - part.saved
        return self.sizes.zeros

    @property
    def _mixer(self) -> int | None:
        block = self.block
        if not isinstance(block, Layer) or block.mixer is None or block.transform is None:
            return None
        return 0 if block.mixer.norm is None else 1


def beside_kept(
    parts: tuple[Kept, ...],
    block: Block,
    sizes: Sizes,
    *,
    inverse: npt.NDArray[np.intp],
    again: BoolArray,
    stays: BoolArray,
) -> dict[str, FloatArray]:
    """Its moments on every row, whose settings `inverse` finds in `sizes`."""
    found: dict[str, FloatArray] = {}
    for cores in (False, True):
        for lasts in (False, True):
            rows = (again == cores) & (stays == lasts)
            if not rows.any():
                continue
            moments = _Backward(parts=parts, block=block, sizes=sizes, again=cores, stays=lasts).moments
            for name, values in moments.items():
                found[name] = np.where(rows, values[inverse], found.get(name, 0.0))
    return found
