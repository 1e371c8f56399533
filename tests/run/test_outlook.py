"""What is known of the next epoch before it comes."""

from __future__ import annotations

from pathlib import Path

from meshwright.cost.copies import copied, left_of
from meshwright.cost.moved import least_bytes, unfit
from meshwright.run.elastic.board import Epoch
from meshwright.run.elastic.outlook import Outlook
from tests.run.pretended import PretendTemplates, apart, of

THREE, FOUR = ("0.0", "1.0", "3.0"), ("0.0", "1.0", "3.0", "2.1")


def epochs(folder: Path, *, sharded: bool = True, each: int = 0) -> tuple[Epoch, Epoch]:
    known = PretendTemplates(folder, sharded=sharded, known=(3, 4), each=each)
    now, before = known.of(((0, 4),)), known.of(((0, 3),))
    return Epoch(number=1, members=THREE, design=str(before)), Epoch(number=2, members=FOUR, design=str(now))


def test_what_was_looked_ahead_to_is_not_worked_out_again(tmp_path: Path) -> None:
    before, now = epochs(tmp_path)
    outlook = Outlook()
    outlook.look_ahead(before, now)
    for epoch in (before, now):
        Path(epoch.design).unlink()
    held = outlook.left(before, now, holders=before.members)
    assert held == left_of(of(3, sharded=True), places={0: 0, 1: 1, 2: 2})
    way = outlook.way(before, now, holders=before.members)
    assert way is not None
    target = copied(of(4, sharded=True))
    assert way.joins(held, target)
    assert not way.joins(target, held)
    assert (way.problems, way.least) == ((), least_bytes(held, target))
    assert {hop.receiver for hops in way.hops for hop in hops} == set(way.least)


def test_there_is_no_way_from_those_who_have_not_all(tmp_path: Path) -> None:
    before, now = epochs(tmp_path)
    outlook = Outlook()
    way = outlook.way(before, now, holders=("0.0",))
    assert way is not None
    assert way.problems == unfit(outlook.left(before, now, holders=("0.0",)), copied(of(4, sharded=True))) != ()
    assert way.hops == ()


def test_of_learners_no_way_is_known_before(tmp_path: Path) -> None:
    before, now = epochs(tmp_path, each=1)
    outlook = Outlook()
    outlook.look_ahead(before, now)
    assert outlook.way(before, now, holders=before.members) is None
    assert outlook.plan(now) == apart(4, 1).plan
    assert outlook.ranks(now)["2.1"] == 3
