"""The peak of memory is predicted where gradients meet rounded, cast or compressed, in every way of sharding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.spec.cluster import Precision
from meshwright.spec.compression import AcpSgd, DeMo, OneBit, PowerSgd, TopK
from meshwright.spec.plan import Design, ScheduleKind, Sharding
from meshwright.spec.synchronize import GradientSync
from tests.run.test_dry_memory import DENSE, asked, hold
from tests.support.designs import Layout, sharded

WAYS = {
    "int8": GradientSync(precision=Precision.INT8),
    "fp8": GradientSync(precision=Precision.FP8),
    "powersgd": GradientSync(compression=PowerSgd()),
    "acpsgd": GradientSync(compression=AcpSgd()),
    "topk": GradientSync(compression=TopK()),
    "demo": GradientSync(compression=DeMo()),
    "one bit": GradientSync(compression=OneBit()),
}
HYBRID = Layout(replicate=2, shard=2, batch=12)
# A layout, and over how many ranks each of eight blocks is sharded.
PLACES = {
    "replicas": (Layout(replicate=4, batch=12), ""),
    "zero1": (replace(HYBRID, sharding=Sharding.OPTIMIZER), ""),
    "zero2": (replace(HYBRID, sharding=Sharding.GRADIENTS), ""),
    "zero3": (replace(HYBRID, sharding=Sharding.PARAMETERS), ""),
    "zero3 of one microbatch": (replace(HYBRID, sharding=Sharding.PARAMETERS, batch=4), ""),
    "pipeline": (Layout(pipeline=2, replicate=2, batch=8), ""),
    "pipeline and zero3": (Layout(pipeline=2, replicate=2, shard=2, sharding=Sharding.PARAMETERS, batch=16), ""),
    "stages that take turns": (
        Layout(pipeline=2, chunks=2, kind=ScheduleKind.INTERLEAVED, replicate=2, batch=8),
        "",
    ),
    "groups by number": (replace(HYBRID, sharding=Sharding.PARAMETERS), "1..11..1"),
}
QUICK = (("int8", "zero3"), ("powersgd", "zero1"), ("topk", "replicas"), ("one bit", "pipeline"))


def meeting(way: str, place: str, *, length: int = 128) -> Design:
    layout, over = PLACES[place]
    entry = asked(DENSE, layout, length=length, layers=6)
    entry = sharded(entry, "3" * 8, over=over) if over else entry
    return replace(entry, plan=replace(entry.plan, gradients=WAYS[way]))


def test_peaks_are_predicted() -> None:
    hold({f"{way}, {place}": meeting(way, place) for way, place in QUICK})


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_so_they_are_wherever_gradients_meet(place: str) -> None:
    hold({f"{way}, {place}": meeting(way, place) for way in WAYS if (way, place) not in QUICK})


@pytest.mark.slow
@pytest.mark.parametrize("place", ["replicas", "zero1", "zero3"])
def test_so_they_are_of_long_sequences(place: str) -> None:
    hold({f"{way}, {place}": meeting(way, place, length=2048) for way in WAYS})


@pytest.mark.slow
def test_so_they_are_where_they_meet_over_two_axes_in_turn() -> None:
    plain = asked(DENSE, Layout(replicate=2, shard=2, batch=12), length=128, layers=6)
    ways = {name: WAYS[name] for name in ("int8", "fp8")} | {"bf16": GradientSync(precision=Precision.BF16)}
    hold({name: replace(plain, plan=replace(plain.plan, gradients=way)) for name, way in ways.items()})


@pytest.mark.slow
def test_a_stage_that_ends_first_has_no_buckets_but_its_own() -> None:
    """Where many parameters meet few tokens, so that gradients on their way decide."""
    turns = Layout(pipeline=2, chunks=2, kind=ScheduleKind.INTERLEAVED, replicate=2, batch=4)
    few = asked(DENSE, turns, length=16, layers=12, vocab=512)
    hold({way: replace(few, plan=replace(few.plan, gradients=WAYS[way])) for way in ("int8", "demo")})
