"""How context ranks meet, by the words of sources: around a ring, gathered, or trading tokens for heads."""

from __future__ import annotations

import pytest

from meshwright.replay.express import express
from meshwright.replay.published import replay
from meshwright.replay.runs import Run
from meshwright.spec.exchange import ExchangeKind
from tests.replay.test_validate import row

RING, GATHER = ExchangeKind.RING, ExchangeKind.GATHER
TOLD = "keys and values of context ranks passed around a ring"


def context_row(context: str = "8", **changes: str) -> Run:
    """Sixteen heads on one tensor rank of one node."""
    plan = {"tp": "1", "pp": "1", "dp": "2", "cp": context, "flash": "yes", "framework": "Megatron-Core"}
    return row(**{**plan, "seq": "8192", "mbs": "1", **changes})


@pytest.mark.parametrize(
    ("extra", "kind", "inner"),
    [
        ("", RING, 1),
        ("Ulysses", RING, 8),
        ("warm; DeepSpeed-Ulysses sequence parallelism, 3 runs", RING, 8),
        ("exchange=all-to-all", RING, 8),
        ("a2a", RING, 8),
        ("ulysses=4", RING, 4),
        ("ulysses 4", RING, 4),
        ("a2a 4", RING, 4),
        ("ring attention", RING, 1),
        ("cp_comm_type=p2p", RING, 1),
        ("cp_comm_type=all_gather", GATHER, 1),
        ("all-gather", GATHER, 1),
        ("exchange=gather", GATHER, 1),
        ("USP ulysses=2 ring=4", RING, 2),
        ("ulysses + ring 2", RING, 4),
        ("exchange=all-to-all 4 in gather 2", GATHER, 4),
        ("without Ulysses", RING, 1),
        ("ring all-reduce; all-gather overlapped; dispatcher=alltoall", RING, 1),
    ],
)
def test_an_exchange_is_read_in_every_spelling(extra: str, kind: ExchangeKind, inner: int) -> None:
    found = express(context_row(extra=extra)).design.plan.exchange
    assert (found.kind, found.inner) == (kind, inner)


@pytest.mark.parametrize(
    ("extra", "told"), [("", True), ("ulysses=4", True), ("Ulysses", False), ("ring", False), ("gather", False)]
)
def test_a_ring_that_nothing_says_is_told(extra: str, told: bool) -> None:
    assert (TOLD in express(context_row(extra=extra)).assumed) is told


def test_nothing_is_told_of_one_context_rank() -> None:
    assert TOLD not in express(row()).assumed


def test_two_levels_without_their_ranks_trade_as_many_heads_as_there_are() -> None:
    found = express(context_row(extra="USP", heads="4", kv_heads="4"))
    assert found.design.plan.exchange.inner == 4
    assert "heads traded by 4 of 8 context ranks, as many as divide them" in found.assumed


def test_all_to_all_in_a_mixture_is_of_its_experts_unless_context_is_said() -> None:
    mixture = {"arch": "moe", "n_experts": "8", "topk": "2", "ffn": "4096", "gated": "yes"}
    found = [express(context_row(**mixture, extra=extra)) for extra in ("all-to-all", "context all-to-all")]
    assert [one.design.plan.exchange.inner for one in found] == [1, 8]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"extra": "ulysses=3"}, "all-to-all over 3 ranks is not a context axis of 8"),
        ({"extra": "ulysses=4 ring=4"}, "all-to-all over 4 ranks in 4 is not a context axis of 8"),
        ({"extra": "Ulysses", "heads": "4"}, "8 context ranks do not divide the heads of a tensor rank; choose 1 or 2"),
        ({"extra": "ring and all-gather"}, "both passed around a ring and gathered"),
        ({"extra": "Ulysses", "cp": "", "dp": "16"}, "all-to-all of context ranks, and cp is 1 or not printed"),
    ],
)
def test_an_exchange_that_cannot_have_been_has_its_reason(changes: dict[str, str], reason: str) -> None:
    assert reason in replay(context_row(**changes)).reason


def test_trading_heads_and_passing_keys_take_times_of_their_own() -> None:
    points = [replay(context_row(extra=extra)).point for extra in ("ring", "Ulysses", "all-gather")]
    assert len({point.predicted_seconds for point in points if point is not None}) == 3
