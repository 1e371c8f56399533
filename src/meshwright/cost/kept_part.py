"""Kept: the bytes that backward keeps of one part of a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.cost.repeated import SCORES, Repeated
from meshwright.cost.work import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes of one part on one device for one microbatch, arrays of shape (combinations,).

    `saved` for backward, of which `core` lies between the inputs of the scores and their output; `working` the most
    that its backward has beside what is saved, and `ending` what it has when both gradients of the last product are
    there, but for the matrix's, `turning` what it has where queries are turned back by their positions, when `done` of
    what is saved is gone, `given` when its experts have theirs, beside which it has what they are `giving` while the
    last of them is made; forward has `making` at the most beside what is saved and, while experts multiply, `inside`,
    and backward `going` when it comes to them; `logits` that the loss reads. `fed`, of `saved`, are inputs of products
    that the gradients of their weights alone read; `late` of those are gone where a whole backward has most. `waits`
    are inputs of all products and the gradients of what they gave, which a split backward keeps for those of their
    weights. `copied` elements of weights are kept beside the parameters where every pass casts them, `experts` of them
    those of experts. `handed` are keys and values that slices leave those behind them, `joined` of `saved` what slices
    but the first have of all that grows with the keys that they meet, such as those that they put together with their
    own, and `first` what that one has; `left` are the gradients that they leave for those before them. `again` is what
    of `saved` but the core can be run again.
    """

    saved: FloatArray
    core: FloatArray | float = 0.0
    working: FloatArray | float = 0.0
    ending: FloatArray | float = 0.0
    turning: FloatArray | float = 0.0
    done: FloatArray | float = 0.0
    given: FloatArray | float = 0.0
    giving: FloatArray | float = 0.0
    making: FloatArray | float = 0.0
    inside: FloatArray | float = 0.0
    going: FloatArray | float = 0.0
    logits: FloatArray | float = 0.0
    fed: FloatArray | float = 0.0
    late: FloatArray | float = 0.0
    waits: FloatArray | float = 0.0
    copied: FloatArray | float = 0.0
    experts: FloatArray | float = 0.0
    handed: FloatArray | float = 0.0
    joined: FloatArray | float = 0.0
    first: FloatArray | float = 0.0
    left: FloatArray | float = 0.0
    again: Mapping[Repeated, FloatArray] = field(default_factory=dict)

    def dropping(self, repeats: frozenset[Repeated]) -> Kept:
        """The same with all that is run again for its core: as it is where that is the core alone."""
        if repeats == SCORES:
            return self
        core = self.core if Repeated.SCORES in repeats else 0.0 * self.saved
        return replace(self, core=core + sum(size for what, size in self.again.items() if what in repeats))
