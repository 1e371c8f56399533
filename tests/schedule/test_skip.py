"""Microbatches that leave out stages: stages learn evenly, none wait for ever, and a slow stage is passed by fewer."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.simulate import StageSeconds, makespan, simulate
from meshwright.schedule import Program, Table, Work, check, in_flight, planned, program, written
from meshwright.schedule import paths as path_lines
from meshwright.schedule.moves import with_moves
from meshwright.schedule.skip import MOST_SWAPPED, Line, Skipping, along, dealt, skipping
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Schedule, ScheduleKind
from meshwright.spec.skip import Swap

SECONDS = st.sampled_from((0.5, 1.0, 1.5, 4.0))


def line(forward: list[float], *, way: float = 0.1, slow: int = -1) -> Line:
    """Backwards take twice as long; the link from stage `slow` on takes four."""
    transfer = tuple(4.0 if stage == slow else way for stage in range(len(forward)))
    return Line(forward=tuple(forward), backward=tuple(2.0 * each for each in forward), transfer=transfer)


def stages_of(at: Line) -> list[StageSeconds]:
    each = zip(at.forward, at.backward, at.transfer, strict=True)
    return [StageSeconds(forward=f, backward=b, transfer=t) for f, b, t in each]


def played(made: Program, at: Line) -> float:
    return makespan(simulate(made, stages=stages_of(at)))


def one_f_one_b(at: Line, *, microbatches: int) -> float:
    kind = ScheduleKind.ONE_F_ONE_B
    return played(program(kind, pipeline=at.stages, chunks=1, microbatches=microbatches), at)


def is_sound(found: Skipping, at: Line, *, ahead: int = 0) -> None:
    """Legal on its paths, even, as long as the event simulation says, and with so many more under way than 1F1B has."""
    made, stages = found.program, at.stages
    assert check(made.table(), stages=stages, paths=made.paths) == ()
    inner = path_lines.visits(made.paths, stages=stages)[1:-1]
    assert max(inner) - min(inner) <= 1
    assert found.bound <= found.seconds * (1 + 1e-12)
    assert played(made, at) == pytest.approx(found.seconds)
    assert all(most <= stages - rank + ahead for rank, most in enumerate(in_flight(made.table())))
    last = [action.microbatch for action in made.table()[-1] if action.work is Work.FORWARD]
    assert last == sorted(last)


@settings(max_examples=15, deadline=None)
@given(forward=st.lists(SECONDS, min_size=4, max_size=6), microbatches=st.integers(4, 9), seed=st.integers(0, 3))
def test_any_line_of_stages_has_a_legal_even_schedule(forward: list[float], microbatches: int, seed: int) -> None:
    at = line(forward, slow=seed)
    for skipped in range(1, len(forward) - 2):
        if microbatches * (at.stages - 2 - skipped) >= at.stages - 2:
            found = skipping(at, microbatches=microbatches, skipped=skipped, ahead=seed, swap=Swap.NEIGHBOURS)
            is_sound(found, at, ahead=seed)
            assert {at.stages - len(path) for path in found.program.paths} == {skipped}
            turned = sum(path != tuple(sorted(path)) for path in found.program.paths)
            assert turned <= MOST_SWAPPED * microbatches


def test_a_slow_stage_is_passed_by_half_and_the_step_is_half_as_long() -> None:
    """Of four stages one takes three times as long: 1F1B is as slow as it is, and here half the microbatches wait."""
    at = line([1.0, 3.0, 1.0, 1.0])
    found = skipping(at, microbatches=16, skipped=1)
    is_sound(found, at)
    assert path_lines.visits(found.program.paths, stages=4) == (16, 8, 8, 16)
    assert found.seconds < 0.6 * one_f_one_b(at, microbatches=16)
    assert found.seconds < 1.1 * found.bound
    again = skipping(at, microbatches=16, skipped=1).program
    assert (again.table(), again.paths) == (found.program.table(), found.program.paths)


def test_nothing_left_out_takes_no_longer_than_1f1b() -> None:
    at = line([1.0, 1.0, 2.0, 1.0], slow=1)
    found = along(at, ((0, 1, 2, 3),) * 8)
    assert found is not None
    is_sound(found, at)
    assert found.seconds <= one_f_one_b(at, microbatches=8) * (1 + 1e-12)


def test_stages_passed_in_both_orders_wait_for_ever_or_are_legal() -> None:
    at = line([1.0] * 4)
    found = along(at, ((0, 2, 1, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)))
    assert found is not None
    is_sound(found, at)
    slow = line([1.0, 1.0, 1.0, 1.0, 10.0, 1.0])
    assert along(slow, (*((0, 4, 3, 5),) * 2, *((0, 3, 4, 5),) * 3, *((0, 1, 2, 5),) * 2)) is None


def test_stages_are_left_out_in_turn() -> None:
    for stages, microbatches, skipped in ((4, 5, 1), (6, 9, 2), (8, 32, 3)):
        counts = Counter(stage for path in dealt(stages, microbatches=microbatches, skipped=skipped) for stage in path)
        assert counts[0] == counts[stages - 1] == microbatches
        assert max(counts.values()) == microbatches
        inner = [counts[stage] for stage in range(1, stages - 1)]
        assert max(inner) - min(inner) <= 1


def made(microbatches: int = 8) -> Schedule:
    return planned.of(skipping(line([1.0] * 5), microbatches=microbatches, skipped=1).program, chunks=1)


def test_a_plan_carries_paths_and_their_order() -> None:
    entry = made()
    found = planned.program(entry, pipeline=5)
    assert planned.problems(entry, pipeline=5) == ()
    assert planned.of(found, chunks=1) == entry
    assert codec.decode(Schedule, codec.encode(entry)) == entry
    assert [planned.passes(entry, stage) for stage in range(5)] == list(path_lines.visits(found.paths, stages=5))
    first = planned.of_first(entry, 6)
    assert planned.problems(first, pipeline=5) == ()
    assert planned.table(first, pipeline=5) == only(planned.table(entry, pipeline=5), 6)


def only(table: Table, count: int) -> Table:
    return tuple(tuple(action for action in row if action.microbatch < count) for row in table)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (("0 1 3", "0 2 3", "0 1"), r"schedule.paths\[2\]: a path that leaves out the embedding or the head"),
        (("0 1 3", "0 2 3", "0 1 1 3"), r"schedule.paths\[2\]: stage 1 is passed 2 times"),
        (("0 1 3", "0 2 3", "0 7 3"), r"schedule.paths\[2\]: stage 7 does not exist"),
        (("0 1 3", "0 2 3"), "2 paths of 3 microbatches"),
        (("0 1 3", "0 1 3", "0 1 3"), "stage 2 is on no path"),
        (("0 1 3", "0 2 3", "nowhere"), "a path that cannot be read"),
        (("0 2 3", "0 1 3", "0 1 3"), "1F0 is not on the microbatch's path"),
    ],
)
def test_what_is_no_path_is_refused_in_words(paths: tuple[str, ...], says: str) -> None:
    rows = ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F2 1B0 1B2", "2F1 2B1", "3F0 3B0 3F1 3B1 3F2 3B2")
    with pytest.raises(ConfigError, match=says):
        written.legal(rows, pipeline=4, chunks=1, microbatches=3, paths=paths)


def test_losses_come_in_the_order_of_microbatches() -> None:
    rows = ("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0")
    with pytest.raises(ConfigError, match="the last stage takes microbatches out of order"):
        written.legal(rows, pipeline=2, chunks=1, microbatches=2)


def test_two_ranks_name_their_messages_in_one_order_and_receive_before_they_compute() -> None:
    found = along(line([1.0] * 4), ((0, 2, 1, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)))
    assert found is not None
    rows, paths = with_moves(found.program), found.program.paths
    between: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    for stage, row in enumerate(rows):
        assert row[-1] == f"{stage}REDUCE_GRAD"
        for place, word in enumerate(row[:-1]):
            way, _, what = word.partition("_")
            if not what:
                continue
            path = paths[int(what[1:])]
            here = path.index(stage)
            onwards = (way.endswith("SEND") and what[0] == "F") or (way.endswith("RECV") and what[0] == "B")
            other = path[here + 1 if onwards else here - 1]
            pair = (stage, other) if way.endswith("SEND") else (other, stage)
            between.setdefault(pair, []).append((way[-4:], what))
            if way.endswith("RECV"):
                assert row.index(f"{stage}{what}") > place
            else:
                assert row[place - 1] == f"{stage}{what}"
    for pair, words in between.items():
        sent = [what for way, what in words if way == "SEND"]
        assert sent == [what for way, what in words if way == "RECV"], pair
