"""Every collective of two real ranks is seen once, with its bytes, its line and the time its thread was held."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.outer.learners import MEETING
from meshwright.spec.plan import Axis, AxisName, Plan, Schedule
from meshwright.spec.report import LineName
from meshwright.spec.span import Span
from meshwright.train.observe.collectives import CollectiveTimer, line_of, operation_of
from meshwright.train.observe.samples import CollectiveCall, axes_spanned, coordinates
from tests.support.pool import Pool

COUNT = 4096
BYTES = COUNT * 4
DELAY = 0.3


def plan(*axes: tuple[AxisName, int]) -> Plan:
    return Plan(
        model="m",
        cluster="c",
        axes=tuple(Axis(name=name, size=size) for name, size in axes),
        stages=(),
        schedule=Schedule(),
        sequence_length=8,
        microbatch=1,
    )


def data_collectives(axis: AxisName, meeting: str) -> tuple[CollectiveCall, ...]:
    """An all-reduce for which rank 0 waits, an all-gather, a reduce-scatter, a send and a receive, and a number.

    Rank 1 is late from when rank 0 stands before the all-reduce: on a busy machine a rank may be late by itself.
    """
    store = dist.FileStore(meeting, 2)
    whole, part = torch.ones(COUNT), torch.ones(COUNT // 2)
    rank = dist.get_rank()
    timer = CollectiveTimer(plan((axis, 2)))
    dist.barrier()
    with timer.watching():
        if rank == 1:
            store.wait(["rank 0 is there"])
            time.sleep(DELAY)
        else:
            store.set("rank 0 is there", "")
        dist.all_reduce(whole)
        work = dist.all_reduce(whole, async_op=True)
        time.sleep(DELAY)
        work.wait()
        dist.all_gather(list(whole.chunk(2)), part)
        dist.reduce_scatter(part, list(whole.chunk(2)))
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, whole, 1 - rank), dist.P2POp(dist.irecv, torch.empty(COUNT), 1 - rank)]
        ):
            work.wait()
        dist.all_reduce(torch.zeros(1))
    return timer.calls


def distributed_tensors() -> tuple[CollectiveCall, ...]:
    """A product of sharded tensors: collectives that only functional operators of local tensors show."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.ones(32, 64), mesh, [Shard(1)])
    columns = distribute_tensor(torch.ones(64, 32), mesh, [Shard(0)])
    timer = CollectiveTimer(plan((AxisName.TENSOR, 2)))
    with timer.watching():
        product = (rows @ columns).redistribute(mesh, [Replicate()])
        assert float(product.to_local()[0, 0]) == 64.0
    return timer.calls


def test_data_collectives_have_their_bytes_lines_and_waits(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(data_collectives, AxisName.SHARD, str(tmp_path / "meeting"), ranks=2)
    assert [call.operation for call in first] == [
        "all_reduce",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "send",
        "recv",
        "all_reduce",
    ]
    assert [call.line for call in first] == [
        LineName.GRADIENTS,
        LineName.GRADIENTS,
        LineName.PARAMETERS,
        LineName.GRADIENTS,
        LineName.TRANSFER,
        LineName.TRANSFER,
        LineName.OTHER,
    ]
    assert [call.bytes for call in first[:6]] == [BYTES] * 6
    assert all(call.ranks == 2 for call in first)
    # Rank 0 waited for rank 1; what ran behind the sleep is not charged. Wide margins: the machine may be busy.
    assert first[0].seconds > 0.3 * DELAY
    assert second[0].seconds < first[0].seconds
    assert min(first[1].seconds, second[1].seconds) < 0.7 * DELAY


def sums_of_learners() -> list[LineName]:
    """A norm before learners meet, one while they do, and a few numbers that they tell each other then."""
    told = dist.new_group([0, 1], group_desc=MEETING)
    timer = CollectiveTimer(plan((AxisName.REPLICATE, 2)))
    with timer.watching():
        dist.all_reduce(torch.zeros(1))
        start = time.perf_counter()
        dist.all_reduce(torch.zeros(2))
        dist.all_reduce(torch.zeros(3), group=told)
        seconds = time.perf_counter() - start
    met = Span(name=LineName.OUTER, rank=-1, start=start, seconds=seconds)
    return [call.line for call in timer.calls_among([met])]


def test_what_learners_sum_where_they_meet_is_of_their_line(pool: Pool) -> None:
    assert pool.run(sums_of_learners, ranks=2) == [[LineName.OTHER, LineName.OUTER, LineName.OTHER]] * 2


def test_tensor_collectives_of_distributed_tensors_are_seen(pool: Pool) -> None:
    calls = pool.run(distributed_tensors, ranks=2)[0]
    assert {call.line for call in calls} == {LineName.TENSOR}
    assert [call.operation for call in calls] == ["all_reduce"]
    assert calls[0].bytes == 32 * 32 * 4
    assert calls[0].seconds > 0.0


def test_waits_are_as_before_when_the_timer_ends(pool: Pool) -> None:
    assert pool.run(wait_is_restored, ranks=2) == [True, True]


def wait_is_restored() -> bool:
    before = dist.Work.wait
    with CollectiveTimer(plan((AxisName.SHARD, 2))).watching():
        assert dist.Work.wait is not before
    return dist.Work.wait is before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_allgather_base_", "all_gather"),
        ("_reduce_scatter_base_", "reduce_scatter"),
        ("allreduce_", "all_reduce"),
        ("alltoall_base_", "all_to_all"),
        ("recv_", "recv"),
        ("all_gather_into_tensor", "all_gather"),
        ("barrier", "barrier"),
        ("monitored", None),
    ],
)
def test_operators_are_known_by_name(name: str, expected: str | None) -> None:
    assert operation_of(name) == expected


@pytest.mark.parametrize(
    ("operation", "axes", "expected"),
    [
        ("all_reduce", {AxisName.TENSOR}, LineName.TENSOR),
        ("all_gather", {AxisName.SHARD}, LineName.PARAMETERS),
        ("reduce_scatter", {AxisName.SHARD}, LineName.GRADIENTS),
        ("all_reduce", {AxisName.REPLICATE, AxisName.SHARD}, LineName.GRADIENTS),
        ("all_reduce", {AxisName.PIPELINE}, LineName.GRADIENTS),
        ("send", {AxisName.PIPELINE}, LineName.TRANSFER),
        ("all_reduce", {AxisName.PIPELINE, AxisName.SHARD}, LineName.OTHER),
    ],
)
def test_lines_follow_axes(operation: str, axes: set[AxisName], expected: LineName) -> None:
    assert line_of(operation, axes=frozenset(axes), num_bytes=2**20) is expected


def test_a_rank_has_a_place_on_every_axis() -> None:
    found = plan((AxisName.PIPELINE, 2), (AxisName.SHARD, 3), (AxisName.TENSOR, 2))
    assert coordinates(found, rank=9) == {AxisName.PIPELINE: 1, AxisName.SHARD: 1, AxisName.TENSOR: 1}
    assert axes_spanned(found, ranks=(0, 1)) == {AxisName.TENSOR}
    assert axes_spanned(found, ranks=(0, 2, 4)) == {AxisName.SHARD}
    assert axes_spanned(found, ranks=(1, 7)) == {AxisName.PIPELINE}
    assert axes_spanned(found, ranks=(0, 9)) == {AxisName.PIPELINE, AxisName.SHARD, AxisName.TENSOR}
