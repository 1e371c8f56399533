"""What plans send and hold whose blocks are divided by other numbers of data parallel ranks than the shard axis has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.spec.cluster import Precision
from meshwright.spec.compression import PowerSgd
from meshwright.spec.plan import Design, Offload, ScheduleKind, Sharding
from meshwright.spec.synchronize import GradientSync, SyncKind, usual_rounds
from tests.parallel.offload_cases import with_groups
from tests.run import dry_cases
from tests.run.dry_cases import case
from tests.run.test_dry_learners import SHARDED, check_traffic
from tests.run.test_dry_memory import DENSE, asked, hold
from tests.support.designs import Layout, sharded

ZERO3 = Sharding.PARAMETERS
TWICE = Layout(replicate=2, shard=2, sharding=ZERO3, batch=8)
# A kind of model of two layers, a layout, how each block is sharded, and over how many ranks.
SENT = {
    "whole, hybrid and full": ("tiny", TWICE, "1323", "1.44"),
    "a tied table": ("tied", TWICE, "3113", "4.14"),
}
MORE_SENT = {
    "tensor ranks": (
        "gpt",
        Layout(replicate=2, shard=2, tensor=2, sequence_parallel=True, sharding=ZERO3, batch=8),
        "1323",
        "14.1",
    ),
    "context ranks": ("tiny", Layout(shard=2, context=2, sharding=ZERO3, batch=8), "1323", "1.1."),
    "halves of backwards": (
        "tiny",
        Layout(pipeline=2, replicate=2, shard=2, sharding=ZERO3, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=16),
        "1323",
        "14.1",
    ),
    "several shard axes": ("tiny", Layout(replicate=4, shard=2, sharding=ZERO3, batch=16), "3321", ".481"),
}
HELD = {
    "whole ends": ("13333331", Layout(shard=4, sharding=ZERO3, batch=12), "1......1"),
    "hybrid": ("33333333", Layout(replicate=2, shard=2, sharding=ZERO3, batch=12), "4..44..4"),
}
MORE_HELD = {
    "whole layers": ("33311333", Layout(shard=4, sharding=ZERO3, batch=12), "...11..."),
    "whole zero2": ("33322333", Layout(shard=4, sharding=ZERO3, batch=12), "...11..."),
    "all whole": ("11111111", Layout(shard=4, sharding=Sharding.OPTIMIZER, batch=12), "1111111."),
    "of one microbatch": ("13333331", Layout(shard=4, sharding=ZERO3, batch=4), "12....21"),
    "of a pipeline": ("33133113", Layout(pipeline=2, shard=2, sharding=ZERO3, batch=8), "1.1..1.1"),
}


# Gradients that meet in another way, of a block among two replicas, four, or none.
MEETINGS = {
    "in eight bits": ("1.44", GradientSync(precision=Precision.INT8)),
    "in factors": ("1..1", GradientSync(compression=PowerSgd(rank=2))),
}
# Blocks in the host's memory, some of which replicas sum on the device first.
AWAY = {
    "whole ends": ("1......1", Layout(shard=4, sharding=ZERO3, batch=12)),
    "hybrid": ("4..44..4", Layout(replicate=2, shard=2, sharding=ZERO3, batch=12)),
    "hybrid, all alike": ("", Layout(replicate=2, shard=2, sharding=ZERO3, batch=12)),
    "of one microbatch": ("...11...", Layout(shard=4, sharding=ZERO3, batch=4)),
}
ROUNDS = {
    "whole ends": ("33333333", "1......1", SyncKind.STREAMING, Precision.INT4),
    "zero1 ends": ("13333331", "1..11..1", SyncKind.EAGER, Precision.INT8),
}


def away(name: str) -> Design:
    over, layout = AWAY[name]
    entry = sharded(asked(DENSE, layout, length=128, layers=6), "3" * 8, over=over)
    return with_groups(entry, offload=Offload.PARAMETERS)


def learners(name: str) -> Design:
    word, over, kind, precision = ROUNDS[name]
    entry = sharded(asked(DENSE, SHARDED, length=64, layers=6), word, over=over)
    rounds = usual_rounds(kind, every=8, learners=2, precision=precision)
    return replace(entry, plan=replace(entry.plan, gradients=GradientSync(kind=kind, rounds=rounds)))


def made(entry: tuple[str, Layout, str, str], *, accelerator: bool = True) -> Design:
    kind, layout, word, over = entry
    return sharded(case(layout, kind=kind, layers=2, accelerator=accelerator), word, over=over)


def check(designs: list[Design]) -> None:
    found = dry_cases.apart(dry_cases.count_fake, designs=designs, rank=0)
    for entry, counted in zip(designs, found, strict=True):
        told = dict(cost.traffic(entry, rank=0).bytes)
        assert told == pytest.approx(dict(counted.bytes), rel=1e-12), entry.plan.describe()


def peaks(cases: dict[str, tuple[str, Layout, str]]) -> None:
    designs = {
        name: sharded(asked(DENSE, layout, length=128, layers=len(word) - 2), word, over=over)
        for name, (word, layout, over) in cases.items()
    }
    hold(designs)


def test_every_byte_is_predicted() -> None:
    check([made(entry) for entry in SENT.values()])


@pytest.mark.slow
def test_so_it_is_beside_other_axes() -> None:
    check([made(entry) for entry in MORE_SENT.values()])
    check([made(entry, accelerator=False) for entry in SENT.values()])


def test_every_byte_of_gradients_that_do_not_travel_whole_is_predicted() -> None:
    entries = [(made(("tiny", TWICE, "1323", over)), gradients) for over, gradients in MEETINGS.values()]
    check([replace(entry, plan=replace(entry.plan, gradients=gradients)) for entry, gradients in entries])


def test_peaks_are_predicted() -> None:
    peaks(HELD)


def test_peaks_of_blocks_in_the_hosts_memory_are_predicted_there_too() -> None:
    hold({name: away(name) for name in list(AWAY)[:2]})


@pytest.mark.slow
@pytest.mark.parametrize("name", list(AWAY)[2:])
def test_so_are_those_of_other_blocks_there(name: str) -> None:
    hold({name: away(name)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_what_learners_keep_and_send_of_them_is_predicted(name: str) -> None:
    entries = {name: learners(name)}
    check_traffic(entries, hold(entries))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_HELD)
def test_so_are_those_of_others(name: str) -> None:
    peaks({name: MORE_HELD[name]})
