"""Which tensor degrees a model can have: what they divide evenly, and what the last rank may have less of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.cost.vocabulary import rows_of
from meshwright.search.rules import Rule, Scope, choices, groups_of
from meshwright.spec.errors import Problem
from meshwright.spec.model import Attention, FeedForward, LatentAttention, Mixture, ModelSpec, Recurrence
from meshwright.spec.plan import Design

Sizes = Callable[[ModelSpec], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What tensor ranks share, by the rule that refuses degrees: `allows(size, degrees)` are those that can share
    `size` of it, and `refused` the words for one that cannot."""

    rule: str
    sizes: Sizes
    allows: Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
    refused: Callable[[int, int], str]

    def degrees(self, model: ModelSpec, degrees: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Those of `degrees` that can share what this is of `model`."""
        found = np.ones(len(degrees), dtype=np.bool_)
        for size in self.sizes(model):
            found &= self.allows(size, degrees)
        return found

    def check(self, design: Design) -> Problem | None:
        """The first group whose degree cannot, with the nearest that can share all of the model."""
        grid = design.plan.tensor_grid
        for where, group in groups_of(design.plan):
            degree = grid.side(group.tensor)
            for size in self.sizes(design.model) if group.tensor >= 1 else ():
                if not self.allows(size, np.array([degree]))[0]:
                    what = self.refused(size, group.tensor)
                    return Problem(where=f"{where}.tensor", what=what, fix=choices(_nearest(design, group.tensor)))
        return None


def legal_degrees(model: ModelSpec, *, most: int) -> tuple[int, ...]:
    """Every number of tensor ranks up to `most` that can share all of the model on a line, ascending."""
    degrees = np.arange(1, min(most, model.vocab) + 1)
    legal = np.logical_and.reduce([shared.degrees(model, degrees) for shared in SHARED])
    return tuple(int(degree) for degree in degrees[legal])


def _nearest(design: Design, degree: int) -> Sequence[int]:
    """The legal degrees on either side of `degree` that the cluster has devices for."""
    grid = design.plan.tensor_grid
    most = grid.side(design.cluster.num_devices)
    legal = [side**grid.dims for side in legal_degrees(design.model, most=most)]
    below, above = [size for size in legal if size < degree], [size for size in legal if size > degree]
    return [*below[-1:], *above[:1]]


def tensor_heads(model: ModelSpec) -> tuple[int, ...]:
    """Distinct numbers of query heads (or recurrence heads) that tensor parallelism divides."""
    mixers = (layer.mixer for layer in model.layers)
    counts = {mixer.heads for mixer in mixers if isinstance(mixer, (Attention, LatentAttention, Recurrence))}
    return tuple(sorted(counts))


def tensor_kv_heads(model: ModelSpec) -> tuple[int, ...]:
    """Distinct numbers of key-value heads, which tensor ranks divide or hold copies of."""
    return model.kv_heads


def tensor_hidden(model: ModelSpec) -> tuple[int, ...]:
    """Distinct feed-forward widths, those of experts and of dense branches included."""
    sizes = set()
    for layer in model.layers:
        sizes |= {part.hidden for part in layer.parts if isinstance(part, (FeedForward, Mixture))}
        if isinstance(layer.transform, Mixture) and layer.transform.shared:
            sizes.add(layer.transform.shared.hidden)
    return tuple(sorted(sizes))


def tensor_vocab(model: ModelSpec) -> tuple[int, ...]:
    return (model.vocab,)


def _evenly(size: int, degrees: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    return np.asarray(size % degrees == 0)


def _in_copies(size: int, degrees: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """As many on every rank, or one on each, which as many ranks hold as any other."""
    return np.asarray((size % degrees == 0) | (degrees % size == 0))


def _in_runs(size: int, degrees: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Runs of equal length of which the last one is shorter and has something."""
    return np.asarray((degrees - 1) * -(-size // degrees) < size)


def _divides(noun: str) -> Callable[[int, int], str]:
    return lambda size, degree: f"{degree} does not divide {size:,} {noun}"


def _neither(size: int, degree: int) -> str:
    return f"{degree} neither divides {size:,} key-value heads nor is a multiple of them"


def _leaves_none(size: int, degree: int) -> str:
    each = rows_of(size, tensor=degree, rank=0)[1]
    return f"{degree} ranks of {each:,} entries of a vocabulary of {size:,} leave the last one none"


SHARED: tuple[Shared, ...] = (
    Shared(rule="tensor-divides-heads", sizes=tensor_heads, allows=_evenly, refused=_divides("heads")),
    Shared(rule="tensor-shares-kv-heads", sizes=tensor_kv_heads, allows=_in_copies, refused=_neither),
    Shared(
        rule="tensor-divides-hidden",
        sizes=tensor_hidden,
        allows=_evenly,
        refused=_divides("features of the feed-forward"),
    ),
    Shared(rule="tensor-shares-vocab", sizes=tensor_vocab, allows=_in_runs, refused=_leaves_none),
)
TENSOR_RULES = tuple(Rule(name=shared.rule, scope=Scope.PLAN, check=shared.check) for shared in SHARED)
