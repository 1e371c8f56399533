"""When a run whose ranks may change copies its state."""

from __future__ import annotations

import pytest

from meshwright.train.elastic import Change, KeepCopies
from meshwright.train.events import CopyState, Started


def change(*, lost: bool = False, from_checkpoint: bool = False) -> Change:
    return Change(why="w", lost=lost, since=0.0, ranks=4, plan="p", from_checkpoint=from_checkpoint)


@pytest.mark.parametrize(
    ("changed", "copies"),
    [(None, 1), (change(lost=True), 1), (change(from_checkpoint=True), 1), (change(), 0)],
    ids=["begins", "lost", "checkpoint", "came"],
)
def test_a_run_copies_as_it_starts_but_where_those_who_were_there_have_it(changed: Change | None, copies: int) -> None:
    kept = KeepCopies(steps=5, change=changed)
    actions = list(kept.react(Started(step=7, total_steps=100)))
    assert sum(isinstance(action, CopyState) for action in actions) == copies
    assert kept.last == 7
