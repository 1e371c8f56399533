"""Exchange: how ranks of the context axis divide attention, and which tokens each of them holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ExchangeKind(StrEnum):
    """How ranks of the context axis meet each other's keys and values: passed around a ring while scores are computed
    (2310.01889), or gathered first (2407.21783)."""

    RING = "ring"
    GATHER = "gather"


class TokenLayout(StrEnum):
    """Which tokens of a sequence each rank of the context axis holds; every rank holds as many.

    contiguous: one run each, so that under a causal mask the last rank has the most work. zigzag: one run from either
    end (2407.21783). striped: every token in turn (2311.09431). balanced: runs dealt by the work that the documents
    of the sequence leave them.
    """

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    STRIPED = "striped"
    BALANCED = "balanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How the context axis divides attention.

    `inner` neighbouring ranks trade tokens for heads by all-to-all (DeepSpeed-Ulysses, 2309.14509); runs of such
    groups meet as `kind` says. inner = the axis is Ulysses alone, 1 is `kind` alone, between is two-level (2405.07719).
    `layout` says which tokens each rank holds.
    """

    kind: ExchangeKind = ExchangeKind.RING
    inner: int = 1
    layout: TokenLayout = TokenLayout.ZIGZAG


def exchange_words(exchange: Exchange, context: int) -> str:
    """`ring`, `all-to-all`, or `all-to-all 4 in ring 2`; ` striped` after it where tokens are not dealt as usual."""
    outer = context // max(exchange.inner, 1)
    words = "all-to-all" if outer == 1 else f"all-to-all {exchange.inner} in {exchange.kind.value} {outer}"
    words = exchange.kind.value if exchange.inner <= 1 else words
    return words if exchange.layout is TokenLayout.ZIGZAG else f"{words} {exchange.layout.value}"
