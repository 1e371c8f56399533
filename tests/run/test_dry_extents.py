"""What plans send and hold whose blocks are divided by other numbers of data parallel ranks than the shard axis has."""

from __future__ import annotations

import pytest

from meshwright import cost
from meshwright.spec.plan import Design, ScheduleKind, Sharding
from tests.run import dry_cases
from tests.run.dry_cases import case
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


def test_peaks_are_predicted() -> None:
    peaks(HELD)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_HELD)
def test_so_are_those_of_others(name: str) -> None:
    peaks({name: MORE_HELD[name]})
