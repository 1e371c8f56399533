"""Two real ranks: what they call and wait for is in their logs, what they tell each other, and what links give."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.train.agree import Agreed, Told, agree
from meshwright.train.events import Examine, Examined, LinksProbed, ProbeLinks
from meshwright.train.inquiries import Inquiries
from meshwright.train.observe.collective_log import CollectiveLog, read_logs
from meshwright.train.observe.inquest import inquest
from meshwright.train.observe.listening import listening
from tests.support.pool import Pool

COUNT = 4096
DELAY = 0.25


def talk(folder: str) -> tuple[float, float, Agreed, Any]:
    """An all-reduce that rank 1 is late for, one that is waited for later, halves gathered, and a send each way."""
    rank = dist.get_rank()
    log = CollectiveLog(Path(folder), rank=rank)
    whole, part = torch.ones(COUNT), torch.ones(COUNT // 2)
    original = dist.Work.wait
    dist.barrier()
    with listening(log):
        log.begin_step(3)
        if rank == 1:
            time.sleep(DELAY)
        dist.all_reduce(whole)
        later = dist.all_reduce(whole, async_op=True)
        time.sleep(0.02)
        later.wait()
        dist.all_gather_into_tensor(whole, part)
        ways = [dist.P2POp(dist.isend, whole, 1 - rank), dist.P2POp(dist.irecv, torch.empty(COUNT), 1 - rank)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()
        seconds, waited = log.step_seconds()
    assert dist.Work.wait is original, "nothing is left of it"
    inside = log.waited_seconds
    dist.all_reduce(whole)
    assert log.waited_seconds == inside
    told = Told(
        stop=rank == 1,
        memory_bytes=100.0 * rank,
        seconds=1.0 + rank,
        input_seconds=0.5 * rank,
        whole_seconds=6.0 + 2.5 * rank,
        waited_seconds=4.0 + rank,
    )
    agreed = agree(told, torch.tensor(1.5), group=dist.group.WORLD, device=torch.device("cpu"))
    inquiries = Inquiries(group=dist.group.WORLD, device=torch.device("cpu"))
    answers = (inquiries.answer(Examine(rank=1)), inquiries.answer(ProbeLinks()))
    apart = Inquiries(group=dist.group.WORLD, device=torch.device("cpu"), hosts=("a", "b"), host_of=(0, 1))
    return seconds, waited, agreed, (*answers, apart.answer(ProbeLinks(num_bytes=1 << 16)))


def test_what_ranks_call_wait_for_and_tell_each_other(pool: Pool, tmp_path: Path) -> None:
    (whole, waited, agreed, answers), (_, late, other, others) = pool.run(talk, str(tmp_path), ranks=2)
    assert waited >= DELAY - 0.05
    assert late < waited
    assert whole >= waited
    logs = read_logs(tmp_path)
    calls = ["all_reduce", "all_reduce", "all_gather", "send", "recv"]
    for rank, log in logs.items():
        assert [entry.operation for entry in log.entries] == calls
        assert [entry.sequence for entry in log.entries] == [1, 2, 3, 1, 2]
        assert {entry.step for entry in log.entries} == {3}
        assert {entry.bytes for entry in log.entries} == {4 * COUNT}
        assert [entry.peer for entry in log.entries] == [None, None, None, 1 - rank, 1 - rank]
        assert all(entry.left is not None and not entry.holds for entry in log.entries)
        assert log.entries[0].group.ranks == (0, 1)
    assert logs[0].entries[0].inside_seconds >= DELAY - 0.05
    assert logs[1].entries[0].before_seconds >= DELAY - 0.05
    second = logs[0].entries[1]
    assert second.left is not None
    assert second.inside_seconds < 0.02 <= second.left - second.entered
    assert inquest(tmp_path).sentences == ()
    assert agreed == other
    assert (agreed.stop, agreed.memory_bytes, agreed.seconds, agreed.input_seconds) == (True, 100.0, 2.0, 0.5)
    assert agreed.load == pytest.approx(1.5)
    assert agreed.ranks is not None
    assert agreed.ranks.own == (2.0, 3.0)
    assert agreed.ranks.waited == (4.0, 5.0)
    assert agreed.ranks.input == (0.0, 0.5)
    assert answers == others
    examined, together, apart = answers
    assert isinstance(examined, Examined)
    assert examined.rank == 1
    assert "load " in examined.words
    assert isinstance(together, LinksProbed)
    assert together.host_of == (0, 0)
    assert together.seconds == ()
    assert isinstance(apart, LinksProbed)
    assert (apart.hosts, apart.num_bytes) == (("a", "b"), 1 << 16)
    assert apart.seconds[0][1] > 0.0 < apart.seconds[1][0]
    assert apart.seconds[0][0] == apart.seconds[1][1] == 0.0
