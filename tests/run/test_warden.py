"""Who trains after ranks are lost, and from what: decided with a real board and pretended workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError

from meshwright.run.elastic.board import Board, Key, Left
from meshwright.run.elastic.epochs import of_this_launch
from meshwright.run.elastic.launch import launch_elastic
from meshwright.run.elastic.seats import origins
from meshwright.run.elastic.warden import Warden
from meshwright.run.failure import Nearness
from meshwright.run.files import load_design
from meshwright.run.screen import Screen
from meshwright.run.waiting import Waiting
from meshwright.spec.errors import EnvironmentUnfit
from tests.run.elastic_runs import elastic
from tests.run.pretended import FIRST, PretendCrew, crew_of, leave, warden
from tests.support.designs import Layout


class EndsMeanwhile(PretendCrew):
    """A worker ends while it is looked at."""

    def has_ended(self, name: str) -> bool:
        before = super().has_ended(name)
        if name == "1.0" and not before:
            self.fails(name)
        return before


@pytest.fixture
def board() -> Board:
    return Board.host(word="the word", say=str.strip)


def test_a_run_loses_a_rank_and_takes_in_another(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path)
    crew = crew_of(made)
    assert made.look()
    crew.fails("2.0")
    leave(made, "0.0", "1.0", newest=7)
    assert made.look()
    assert made.epoch.number == 0, "one has not come yet"
    assert board.is_broken(0)
    leave(made, "3.0", newest=6)
    made.look()
    assert made.epoch.members == ("0.0", "1.0", "3.0")
    assert made.epoch.source == Key(epoch=0, number=7, step=7), "replicas hold all of what one of them copied"
    assert made.epoch.holders == ("0.0", "1.0")
    assert made.epoch.why == "rank 2 was killed (signal 9)"
    assert made.epoch.lost
    assert made.epoch == board.epoch(1) == board.first_epoch("0.0")
    made.look()
    assert "2.1" not in crew.names, "the others do not train yet"
    board.note_at_work(1)
    made.look()
    assert "2.1" in crew.names
    assert board.expected is not None
    assert board.expected.members == ("0.0", "1.0", "3.0", "2.1")
    made.look()
    assert not board.is_change_asked(1), "it is not ready yet"
    crew.fails("2.1")
    made.look()
    assert "2.2" in crew.names, "another is started for one that ended before it was taken in"
    expected = board.expected
    board.stand_ready("2.2")
    made.look()
    assert board.is_change_asked(1)
    leave(made, "0.0", "1.0", "3.0", newest=9, error="")
    made.look()
    assert made.epoch.members == ("0.0", "1.0", "3.0", "2.2")
    assert expected is not None
    assert (expected.number, expected.members, expected.design) == (2, made.epoch.members, made.epoch.design)
    assert (made.epoch.source, made.epoch.undone_steps) == (Key(epoch=1, number=9, step=9), 0)
    assert not made.epoch.lost
    crew.fails("2.2")
    leave(made, "0.0", "1.0", "3.0", newest=12)
    made.look()
    assert made.epoch.members == ("0.0", "1.0", "3.0")
    board.note_at_work(3)
    made.look()
    assert "2.3" not in crew.names, "its place was filled twice already"


def test_those_who_come_together_are_taken_in_at_once(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path)
    for name in ("2.0", "3.0"):
        crew_of(made).fails(name)
    leave(made, "0.0", "1.0", newest=7)
    made.look()
    board.note_at_work(1)
    made.look()
    board.stand_ready("2.1")
    made.look()
    assert not board.is_change_asked(1), "another is on its way"
    board.stand_ready("3.1")
    made.look()
    assert board.is_change_asked(1)
    leave(made, "0.0", "1.0", newest=9, error="")
    made.look()
    assert made.epoch.members == ("0.0", "1.0", "2.1", "3.1")


def test_a_learner_that_loses_a_rank_is_out_until_it_is_whole(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path, known=(4, 2), each=2)
    crew = crew_of(made)
    crew.fails("1.0")
    leave(made, "0.0", "2.0", "3.0", newest=7)
    made.look()
    assert made.epoch.members == ("2.0", "3.0"), "the second learner goes on alone"
    assert (made.epoch.source, made.epoch.holders) == (Key(epoch=0, number=7, step=7), ("2.0", "3.0"))
    assert made.epoch.why == "rank 1 was killed (signal 9); 1 of a learner that is not whole waits for others"
    board.stand_ready("0.0")
    board.note_at_work(1)
    made.look()
    assert "1.1" in crew.names
    assert not board.is_change_asked(1), "one rank is no learner"
    board.stand_ready("1.1")
    made.look()
    assert board.is_change_asked(1)
    leave(made, "2.0", "3.0", newest=16, error="")
    made.look()
    assert made.epoch.members == ("2.0", "3.0", "0.0", "1.1")
    assert made.epoch.why == "1 started in the place of lost ones has come; 1 that waited has come"
    assert made.epoch.holders == ("2.0", "3.0")
    plans = [load_design(Path(board.epoch(number).design)).plan for number in range(3)]
    lone, again = board.epoch(1).members, made.epoch.members
    found = origins(plans[2], again, before=plans[1], had=lone, holders=lone)
    assert found == (0, None), "who has stale state of an old epoch begins anew"


def test_learners_that_are_alive_go_on_as_themselves_from_a_copy_that_all_have(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path, each=1)
    crew_of(made).fails("1.0")
    leave(made, "0.0", "3.0", newest=12)
    leave(made, "2.0", newest=11)
    made.look()
    assert made.epoch.members == ("0.0", "2.0", "3.0")
    assert (made.epoch.source, made.epoch.holders) == (Key(epoch=0, number=11, step=11), ("0.0", "2.0", "3.0"))
    assert made.epoch.undone_steps == 1


def test_learners_none_of_which_is_whole_go_on_from_a_checkpoint(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path, known=(4, 2), each=2)
    crew_of(made).fails("1.0")
    crew_of(made).fails("2.0")
    leave(made, "0.0", "3.0", newest=7)
    made.look()
    assert made.epoch.members == ("0.0", "3.0")
    assert (made.epoch.source, made.epoch.undone_steps) == (None, 7)


def test_shards_go_on_from_a_copy_that_all_have_or_from_a_checkpoint(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path, sharded=True)
    crew_of(made).fails("1.0")
    leave(made, "0.0", "3.0", newest=7)
    leave(made, "2.0", newest=6)  # which keeps what rank 1 had
    made.look()
    assert made.epoch.source == Key(epoch=0, number=6, step=6)
    assert made.epoch.holders == ("0.0", "2.0", "3.0")
    assert made.epoch.undone_steps == 1
    crew_of(made).fails("2.0")
    crew_of(made).fails("3.0")
    leave(made, "0.0", newest=9)
    made.look()
    assert made.over == "1 of 3 ranks are left, too few to go on"
    assert board.epoch(2).members == ()


def test_what_is_lost_with_its_neighbour_is_gone_on_with_from_a_checkpoint(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path, sharded=True)
    crew_of(made).fails("1.0")
    crew_of(made).fails("2.0")
    leave(made, "0.0", "3.0", newest=7)
    made.look()
    assert made.epoch.members == ("0.0", "3.0")
    assert (made.epoch.source, made.epoch.undone_steps) == (None, 7)
    assert made.epoch.why == "rank 1 was killed (signal 9); rank 2 was killed (signal 9)"


def test_one_that_ends_while_it_is_looked_at_is_lost_and_not_done(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path)
    made.crew = EndsMeanwhile(board)
    for name in FIRST:
        made.crew.start(name)
    leave(made, "0.0", "2.0", "3.0", newest=3)
    made.look()
    assert made.over is None
    made.look()
    assert made.epoch.members == ("0.0", "2.0", "3.0")
    assert made.epoch.why == "rank 1 was killed (signal 9)"


def test_an_error_of_its_own_ends_the_run(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path)
    crew = crew_of(made)
    crew.fails("1.0", Nearness.OWN)
    leave(made, "0.0", "2.0", "3.0", newest=3)
    made.look()
    assert made.over == "a bad thing"
    for name in FIRST:
        crew.running[name] = False
    assert not made.look()
    assert "1.1" not in crew.names


def test_an_error_of_one_rank_s_own_disk_is_a_loss(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path)
    crew = crew_of(made)
    crew.fails_locally("1.0", "nothing more can be written: No space left on device")
    leave(made, "0.0", "2.0", "3.0", newest=3)
    made.look()
    assert made.epoch.members == ("0.0", "2.0", "3.0")
    assert made.epoch.why == "rank 1 failed: nothing more can be written: No space left on device"
    assert made.epoch.lost
    assert made.wanted == ["1.1"]


def test_a_full_disk_that_a_second_rank_meets_ends_the_run(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path)
    crew = crew_of(made)
    crew.fails_locally("1.0", "the checkpoint of step 10 was not saved")
    leave(made, "0.0", "2.0", "3.0", newest=3)
    made.look()
    assert made.over is None
    crew.fails_locally("2.0", "out of memory")
    leave(made, "0.0", "3.0", newest=5)
    made.look()
    assert made.over is None, "that is another matter"
    assert made.epoch.members == ("0.0", "3.0")
    crew.fails_locally("3.0", "the checkpoint of step 20 was not saved")
    leave(made, "0.0", newest=20)
    made.look()
    assert made.over == "the checkpoint of step 20 was not saved"


def test_what_all_ranks_meet_at_once_ends_the_run(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path)
    for name in ("1.0", "2.0"):
        crew_of(made).fails_locally(name, "out of memory")
    leave(made, "0.0", "3.0", newest=3)
    made.look()
    assert made.over == "out of memory"


def test_without_a_plan_for_those_who_are_left_the_run_ends(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path, known=(4,))
    crew_of(made).fails("1.0")
    leave(made, "0.0", "2.0", "3.0", newest=3)
    made.look()
    assert made.over == "3 of 4 ranks are left, too few to go on"


def test_ranks_that_lose_each_other_for_no_reason_give_up_in_the_end(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path)
    leave(made, *FIRST, newest=3)
    made.look()
    assert made.epoch.why == "ranks lost contact: connection closed by peer"
    while made.over is None:
        leave(made, *FIRST, newest=3)
        made.look()
    assert made.epoch.number == 4
    assert "again and again" in made.over


def test_one_that_is_stopped_where_others_waited_too_long_is_ended(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        board.register("2.0", pid=process.pid)
        waiting = Waiting(where="step 3, optimizer", collective="all_reduce 4", timed_out=True)
        left = Left(step=3, copies=(Key(epoch=0, number=3, step=3),), error="timed out waiting", waiting=waiting)
        for name in ("0.0", "1.0", "3.0"):
            board.leave(0, name, left)
        made.look()
        assert process.poll() is None, "it may come yet"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        made.look()
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    crew_of(made).fails("2.0")
    made.look()
    assert made.epoch.why == "rank 2 did not come to where the others waited: hung or stopped"


def test_a_launcher_that_loses_its_own_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(_warden: Warden) -> bool:
        raise DistNetworkError("connection closed by peer, a board: [Errno 104] Connection reset by peer")

    monkeypatch.setattr(Warden, "begin", lambda _warden: None)
    monkeypatch.setattr(Warden, "look", cut)
    made = elastic(tmp_path, Layout(replicate=3, batch=12), steps=4)
    with pytest.raises(EnvironmentUnfit, match="the launcher has lost its own network"):
        launch_elastic(made, tmp_path, arguments=(), say=str.strip, screen=Screen.QUIET)


def test_another_host_decides_from_where_the_last_one_was(board: Board, tmp_path: Path) -> None:
    made = warden(board, tmp_path)
    crew_of(made).fails("2.0")
    leave(made, "0.0", "1.0", "3.0", newest=7)
    made.look()
    epochs = of_this_launch(tmp_path)
    assert epochs == [board.epoch(0), board.epoch(1)]
    other, crew = Board.host(word="the word", say=str.strip), PretendCrew(board)
    for name in ("0.0", "1.0"):
        crew.start(name)
    crew.fails("3.0")
    later = Warden(
        run_dir=tmp_path,
        board=other,
        crew=crew,
        templates=made.templates,
        spec=made.spec,
        patience_seconds=60.0,
        epoch=epochs[-1],
    )
    later.take_over(epochs, places=4)
    assert (other.epoch(1), other.first_epoch("1.0").number) == (epochs[1], 1)
    assert later.wanted == ["2.1"], "rank 2 is still to be replaced"
    leave(later, "0.0", "1.0", newest=9)
    later.look()
    assert other.epoch(2).members == ("0.0", "1.0")
    assert other.epoch(2).source == Key(epoch=1, number=9, step=9)
    assert later.wanted == ["2.1", "3.1"]
