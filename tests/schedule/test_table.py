"""What check refuses, and that it refuses nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import Action, Program, Table, Work, build, check, in_flight, needs, program, to_csv
from meshwright.schedule.graph import edges
from meshwright.spec.plan import ScheduleKind

TABLE = build(ScheduleKind.ONE_F_ONE_B, pipeline=3, chunks=1, microbatches=4)


def parse(*rows: str) -> Table:
    cells = [row.split() for row in rows]
    return tuple(
        tuple(Action(work=Work(cell[1]), stage=int(cell[0]), microbatch=int(cell[2:])) for cell in row) for row in cells
    )


def told(table: Table, *, stages: int) -> str:
    return "\n".join(map(str, check(table, stages=stages)))


@settings(max_examples=40)
@given(rank=st.integers(0, 2), index=st.integers(0, 7))
def test_any_action_left_out_is_missed(rank: int, index: int) -> None:
    row = TABLE[rank]
    broken = (*TABLE[:rank], row[:index] + row[index + 1 :], *TABLE[rank + 1 :])
    missing = row[index]
    name = "forward" if missing.work is Work.FORWARD else "backward"
    assert f"stage {missing.stage}, microbatch {missing.microbatch}: the {name} is missing" in told(broken, stages=3)


def test_an_action_done_twice_is_refused() -> None:
    assert "1F0 is done 2 times" in told((TABLE[0], (TABLE[1][0], *TABLE[1]), TABLE[2]), stages=3)


def test_backward_before_its_forward_is_refused() -> None:
    assert "0B0 comes before 0F0" in told(parse("0B0 0F0"), stages=1)
    assert "0W0 comes before 0I0" in told(parse("0F0 0W0 0I0"), stages=1)


def test_an_action_on_another_rank_is_refused() -> None:
    swapped = (TABLE[1], TABLE[0], TABLE[2])
    assert "0F0 is on the wrong rank; rank 0 holds the stage" in told(swapped, stages=3).replace("table[1][0]: ", "")
    assert check(swapped, stages=3, placement=(1, 0, 2)) == ()
    assert "9F0 is of a stage that does not exist" in told(parse("0F0 0B0 9F0 9B0"), stages=1)


def test_ranks_that_wait_for_each_other_are_told_with_their_places() -> None:
    table = parse("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    text = told(table, stages=2)
    assert "rank 0 waits for ever at 0B0" in text
    assert "rank 1 waits for ever at 1F1" in text
    assert check(parse("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), stages=2) == ()


def test_split_backward_is_legal_and_holds_its_activation_until_the_weight_half() -> None:
    table = parse("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    assert check(table, stages=2) == ()
    assert in_flight(table) == (2, 2)
    assert "the backward is BW; one B, or one I and one W" in told(parse("0F0 0B0 0W0"), stages=1)


def test_slices_go_forward_in_order_and_backward_in_reverse() -> None:
    whole = (
        Action(work=Work.FORWARD, stage=0, microbatch=0),
        Action(work=Work.FORWARD, stage=0, microbatch=0, slice=1),
    )
    back = tuple(Action(work=Work.BACKWARD, stage=0, microbatch=0, slice=part) for part in (1, 0))
    assert check(((*whole, *back),), stages=1) == ()
    assert "0F0.1 comes before 0F0" in told(((*reversed(whole), *back),), stages=1)
    assert "0B0 comes before 0B0.1" in told(((*whole, *reversed(back)),), stages=1)
    assert "stage 0, microbatch 0, slice 0: the backward is missing" in told(((*whole, back[0]),), stages=1)


def test_what_an_action_needs_is_an_edge_of_the_graph() -> None:
    shape = {"pipeline": 3, "chunks": 2, "microbatches": 6}
    for kind in (ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUAL_PIPE_V, ScheduleKind.BREADTH_FIRST):
        made = program(kind, **shape)
        actions = [action for row in made.table() for action in row]
        for action, needed in zip(actions, edges(made).tolist(), strict=True):
            elsewhere = [key for key in needs(action, stages=6) if key[1] != action.stage]
            assert len(elsewhere) == (needed < len(actions))
            for work, stage, microbatch, part in elsewhere:
                found = actions[needed]
                assert (found.stage, found.microbatch, found.slice) == (stage, microbatch, part)
                assert (found.work is Work.FORWARD) == (work is Work.FORWARD)


def test_arrays_and_tables_are_the_same_schedule() -> None:
    made = program(ScheduleKind.SEQUENCE_1F1B, pipeline=3, chunks=1, microbatches=4, slices=2)
    again = Program.from_table(made.table(), stages=3)
    assert again.table() == made.table()
    assert (again.ranks, again.microbatches, again.slices) == (3, 4, 2)
    assert Program.from_table(parse("0F0 0B0", ""), stages=1).ranks == 2


def test_the_text_is_one_line_a_rank() -> None:
    assert to_csv(parse("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
