"""Who kept the others waiting, from logs and stacks that are written as ranks write them."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from meshwright.train.observe.collective_log import CollectiveLog, Group, path_of, read_logs
from meshwright.train.observe.inquest import Inquest, inquest
from meshwright.train.observe.stacks import main_thread, outliers, stacks_of
from meshwright.train.observe.stacks import path_of as stack_path

Script = Callable[["Rank"], None]


class Rank:
    """A rank that writes what it is told to have done, all in the group of everyone."""

    def __init__(self, run_dir: Path, *, rank: int, ranks: int, kept: int = 64) -> None:
        self.log = CollectiveLog(run_dir, rank=rank, kept=kept)
        self.group = self.log.know(Group(name="0", ranks=tuple(range(ranks)), described="default_pg"))
        self.log.begin_step(7)

    def enters(self, operation: str, num_bytes: int = 4096, *, peer: int = -1) -> int:
        return self.log.enter(self.group, operation, num_bytes, peer=peer)

    def did(self, *operations: str) -> None:
        for operation in operations:
            self.log.leave(self.enters(operation), inside_seconds=0.01)


def ended(run_dir: Path, scripts: Sequence[Script]) -> Inquest:
    for rank, script in enumerate(scripts):
        script(Rank(run_dir, rank=rank, ranks=len(scripts)))
    return inquest(run_dir)


def waits(*before: str, operation: str = "all_reduce", num_bytes: int = 4096) -> Script:
    def script(rank: Rank) -> None:
        rank.did(*before)
        rank.enters(operation, num_bytes)

    return script


def test_what_is_written_is_read_the_newest_alone(tmp_path: Path) -> None:
    rank = Rank(tmp_path, rank=3, ranks=5, kept=8)
    rank.did(*["all_reduce"] * 10)
    rank.log.leave(rank.enters("send", 12, peer=4), inside_seconds=0.5)
    rank.log.begin_step(8)
    started = rank.enters("all_gather", 100)
    rank.log.begun(started)
    log = read_logs(tmp_path)[3]
    assert [entry.sequence for entry in log.entries] == [5, 6, 7, 8, 9, 10, 1, 11]
    send, gather = log.entries[-2:]
    assert (send.operation, send.peer, send.bytes, send.step) == ("send", 4, 12, 7)
    assert send.inside_seconds == pytest.approx(0.5)
    assert send.left is not None
    assert send.left >= send.entered
    assert (gather.operation, gather.left, gather.holds, gather.step) == ("all_gather", None, False, 8)
    assert gather.group.ranks == (0, 1, 2, 3, 4)


def test_ranks_of_a_mesh_are_told_whole(tmp_path: Path) -> None:
    log = CollectiveLog(tmp_path, rank=0)
    groups = [(0, 4, 8, 12), (0, 1, 4, 5, 8, 9), (5,), (0, 1, 3, 7, 8)]
    for number, ranks in enumerate(groups):
        log.leave(log.enter(log.know(Group(name=str(number), ranks=ranks)), "barrier", 0), inside_seconds=0.0)
    assert [entry.group.ranks for entry in read_logs(tmp_path)[0].entries] == groups


def test_a_log_that_is_cut_off_or_none_is_left_out(tmp_path: Path) -> None:
    for rank in range(3):
        Rank(tmp_path, rank=rank, ranks=3).did("barrier")
    path_of(tmp_path, 1).write_bytes(path_of(tmp_path, 1).read_bytes()[:40])
    path_of(tmp_path, 2).with_suffix(".json").write_text("{")
    assert list(read_logs(tmp_path)) == [0]
    assert read_logs(tmp_path / "nowhere") == {}


def test_where_no_file_can_be_made_seconds_are_counted_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "collectives").write_text("in the way")
    rank = Rank(tmp_path, rank=0, ranks=2)
    rank.did("all_reduce")
    assert rank.log.held(0.0) > 0.0
    assert rank.log.waited_seconds > 0.0


def test_the_rank_that_did_not_come_is_named(tmp_path: Path) -> None:
    found = ended(tmp_path, [waits("all_gather"), waits("all_gather"), lambda rank: rank.did("all_gather")])
    assert found.suspects == (2,)
    assert found.sentences == (
        "rank 2 kept others waiting in step 7: ranks 0 and 1 waited for it in all_reduce 2 of ranks 0, 1 and 2 "
        "(4 KiB); it came out of all_gather 1 last",
    )


def test_a_chain_ends_at_the_rank_that_waits_for_nobody(tmp_path: Path) -> None:
    """Rank 0 waits to receive from rank 1, which waits for rank 2, which computes."""

    def receives(rank: Rank) -> None:
        rank.enters("recv", 64, peer=1)

    def too(rank: Rank) -> None:
        rank.enters("recv", 64, peer=2)

    found = ended(tmp_path, [receives, too, lambda rank: rank.did("barrier")])
    assert found.suspects == (2,)
    assert "rank 1 waited for it in a recv of 64 B" in found.sentences[0]


def test_a_rank_that_died_in_a_collective_that_others_came_out_of_is_named(tmp_path: Path) -> None:
    def goes_on(rank: Rank) -> None:
        rank.did("all_gather")
        rank.enters("all_reduce", 4096)

    found = ended(tmp_path, [goes_on, lambda rank: rank.enters("all_gather", 4096)])
    assert found.suspects == (), "it waits itself, which is no reason to end it"
    assert found.sentences == (
        "rank 1 kept others waiting in step 7: rank 0 waited for it in all_reduce 2 of ranks 0 and 1 (4 KiB); "
        "it did not come out of all_gather 1",
    )


def test_ranks_that_called_another_collective_are_named_with_both(tmp_path: Path) -> None:
    found = ended(tmp_path, [waits("all_reduce"), waits("all_reduce"), waits("all_reduce", operation="broadcast")])
    assert found.sentences[0] == (
        "desynchronised in collective 2 of ranks 0, 1 and 2, step 7: ranks 0 and 1 entered all_reduce of 4 KiB "
        "where rank 2 entered broadcast of 4 KiB"
    )


def test_another_size_is_told_too_where_sizes_have_to_be_alike(tmp_path: Path) -> None:
    found = ended(tmp_path, [waits(), waits(num_bytes=8192)])
    assert "rank 0 entered all_reduce of 4 KiB where rank 1 entered all_reduce of 8 KiB" in found.sentences[0]
    uneven = [waits(operation="all_to_all"), waits(operation="all_to_all", num_bytes=8192)]
    assert "desynchronised" not in str(ended(tmp_path / "even", uneven).sentences)


def test_where_all_have_come_it_is_the_network(tmp_path: Path) -> None:
    found = ended(tmp_path, [waits(), lambda rank: rank.did("all_reduce"), waits()])
    assert found.suspects == ()
    assert found.sentences == (
        "every rank had entered what it waited in: ranks 0 and 2 did not come out of all_reduce 1",
    )


def test_a_run_that_ended_well_has_no_suspect(tmp_path: Path) -> None:
    def prefetched(rank: Rank) -> None:
        rank.did("all_reduce")
        rank.log.begun(rank.enters("all_gather"))

    assert ended(tmp_path, [prefetched, lambda rank: rank.did("all_reduce")]) == Inquest(suspects=(), sentences=())


def stack(run_dir: Path, rank: int, *names: str) -> None:
    path = stack_path(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    frames = "".join(f'  File "/lib/{name}.py", line 5 in {name}\n' for name in names)
    path.write_text(f"Thread 0x01 (most recent call first):\n  File \"/lib/pool.py\", line 1 in idle\n\n"
                    f"Current thread 0x02 (most recent call first):\n{frames}")  # fmt: skip


def test_the_stack_of_the_one_that_stood_elsewhere_is_told(tmp_path: Path) -> None:
    for rank in (0, 1):
        stack(tmp_path, rank, "wait", "all_reduce", "step")
    stack(tmp_path, 2, "read", "next", "step")
    assert outliers(stacks_of(tmp_path)) == (2,)
    found = ended(tmp_path, [waits(), waits(), lambda rank: rank.did("send")])
    assert (
        found.sentences[-1]
        == "rank 2 stood in read (read.py:5), called by next (next.py:5), called by step (step.py:5)"
    )


def test_what_faulthandler_writes_is_read(tmp_path: Path) -> None:
    with (tmp_path / "dump").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    newest = main_thread((tmp_path / "dump").read_text())[0]
    assert newest.name == "test_what_faulthandler_writes_is_read"
    assert Path(newest.file) == Path(__file__)
    assert main_thread("nothing of the kind") == ()
