"""Names of feed-forwards and of experts, in each of the forms that families store them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.catalog.huggingface.tensors.pieces import Cut, Pieces
from meshwright.spec.blocks import FeedForward, Mixture


class Stored(StrEnum):
    """How the experts of a layer are stored.

    `each`: a matrix of its own for every expert. The others stack all experts, gate and up in one tensor: `halves` as
    (expert, inputs, outputs) with gate before up, `alternating` with gate at even and up at odd outputs, and `outputs`
    as (expert, outputs, inputs) with gate before up.
    """

    EACH = "each"
    HALVES = "halves"
    ALTERNATING = "alternating"
    OUTPUTS = "outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a family calls the parts of a mixture; `each` is gate, up and down of one expert."""

    stored: Stored = Stored.EACH
    router: str = "gate"
    shared: str = "shared_experts"
    each: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def add_feed_forward(pieces: Pieces, spec: FeedForward, *, fused: bool = False) -> None:
    """Gated; `fused` has gate and up in one matrix, in this order."""
    shape = (spec.hidden, spec.width)
    for index, (ours, theirs) in enumerate((("gate", "gate_proj"), ("up", "up_proj"))):
        cut = Cut(dim=0, start=index * spec.hidden, stop=(index + 1) * spec.hidden) if fused else None
        pieces.matrix(ours, "gate_up_proj" if fused else theirs, shape, bias=spec.bias, cut=cut)
    pieces.matrix("down", "down_proj", (spec.width, spec.hidden), bias=spec.bias)


def add_mixture(pieces: Pieces, spec: Mixture, names: ExpertNames) -> None:
    """Router, experts and the branch that every token takes."""
    pieces.matrix("router", names.router, (spec.experts, spec.width), bias=spec.router_bias)
    if spec.routing.bias_rate:
        pieces.add("balance", f"{names.router}.e_score_correction_bias", (spec.experts,), exact=True)
    add_experts(pieces.under("experts.", "experts."), spec, names)
    if spec.shared is not None:
        add_feed_forward(pieces.under("shared.", f"{names.shared}."), spec.shared)


def add_experts(pieces: Pieces, spec: Mixture, names: ExpertNames) -> None:
    """The matrices of all experts."""
    if names.stored is Stored.EACH:
        _add_each(pieces, spec, names)
    else:
        _add_stacked(pieces, spec, names.stored)


def _add_each(pieces: Pieces, spec: Mixture, names: ExpertNames) -> None:
    wide, narrow = (spec.hidden, spec.width), (spec.width, spec.hidden)
    for ours, theirs, shape in zip(("gate", "up", "down"), names.each, (wide, wide, narrow), strict=True):
        for expert in range(spec.experts):
            pieces.add(ours, f"{expert}.{theirs}.weight", shape, index=expert)


def _add_stacked(pieces: Pieces, spec: Mixture, stored: Stored) -> None:
    hidden, count = spec.hidden, spec.experts
    alternating, transposed = stored is Stored.ALTERNATING, stored is not Stored.OUTPUTS
    for index, ours in enumerate(("gate", "up")):
        start, stop = (index, 2 * hidden) if alternating else (index * hidden, (index + 1) * hidden)
        step = 2 if alternating else 1
        cut = Cut(dim=2 if transposed else 1, start=start, stop=stop, step=step)
        pieces.add(ours, "gate_up_proj", (count, hidden, spec.width), transposed=transposed, cut=cut)
        if spec.expert_bias:
            bias_cut = Cut(dim=1, start=start, stop=stop, step=step)
            pieces.add(f"{ours}_bias", "gate_up_proj_bias", (count, hidden), cut=bias_cut)
    pieces.add("down", "down_proj", (count, spec.width, hidden), transposed=transposed)
    if spec.expert_bias:
        pieces.add("down_bias", "down_proj_bias", (count, spec.width))
