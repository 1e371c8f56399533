"""Peaks of experts that lie whole on their ranks, which others have gathered, in every schedule and way of sharding;
and of scores that are written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.run.dry_run import dry_run
from meshwright.spec.model import Layer, Mixture
from meshwright.spec.plan import Design, ExpertGrid, Recompute, ScheduleKind, Sharding
from meshwright.spec.report import LineName, MemoryPart
from tests.run.test_dry_memory import DENSE, MIXER, SPARSE, asked, hold
from tests.support.designs import Layout

assert isinstance(SPARSE.transform, Mixture)
WIDE = replace(SPARSE, transform=replace(SPARSE.transform, hidden=1408))
WHOLE = Layout(shard=4, experts=ExpertGrid(expert=4, tensor=1), batch=16)
SCHEDULES = {
    "alone": replace(WHOLE, batch=12),
    "1f1b": replace(WHOLE, pipeline=2),
    "gpipe": replace(WHOLE, pipeline=2, kind=ScheduleKind.GPIPE),
    "zb-h1": replace(WHOLE, pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_H1),
    "interleaved": replace(WHOLE, pipeline=2, chunks=2, kind=ScheduleKind.INTERLEAVED),
    "breadth-first": replace(WHOLE, pipeline=2, chunks=2, kind=ScheduleKind.BREADTH_FIRST),
    "zb-v": replace(WHOLE, pipeline=2, chunks=2, kind=ScheduleKind.ZERO_BUBBLE_V),
    "dualpipe-v": replace(WHOLE, pipeline=2, chunks=2, kind=ScheduleKind.DUAL_PIPE_V, batch=24),
}
QUICK = {
    "gpipe": (Sharding.NONE, Recompute.NONE),
    "interleaved": (Sharding.OPTIMIZER, Recompute.NONE),
    "1f1b": (Sharding.PARAMETERS, Recompute.NONE),
    "breadth-first": (Sharding.OPTIMIZER, Recompute.FULL),
}


def whole(schedule: str, sharding: Sharding, recompute: Recompute, *, layers: int = 8) -> Design:
    return asked(WIDE, replace(SCHEDULES[schedule], sharding=sharding, recompute=recompute), layers=layers)


@pytest.mark.usefixtures("counted_in_turn")
def test_the_rank_with_most_choices_and_counts_of_all_experts_are_predicted() -> None:
    """Choices that do not divide among the experts, and a bias for which all ranks add up those of every stage."""
    routing = replace(SPARSE.transform.routing, bias_rate=1e-3)
    layer = replace(SPARSE, transform=replace(SPARSE.transform, experts=24, hidden=128, routing=routing))
    entry = asked(layer, replace(SCHEDULES["1f1b"], sharding=Sharding.OPTIMIZER))
    gaps = {gap.name: gap for gap in dry_run(entry).gaps}
    for name in (LineName.FORWARD, LineName.BACKWARD, LineName.EXPERTS, LineName.OTHER):
        assert gaps[name].predicted == pytest.approx(gaps[name].measured, rel=1e-12), name


def test_peaks_of_experts_that_lie_whole_are_predicted() -> None:
    hold({name: whole(name, *ways, layers=4) for name, ways in QUICK.items()})


@pytest.mark.slow
@pytest.mark.parametrize("sharding", Sharding)
@pytest.mark.parametrize("recompute", Recompute)
def test_peaks_of_experts_that_lie_whole_are_so_in_every_schedule(sharding: Sharding, recompute: Recompute) -> None:
    hold({name: whole(name, sharding, recompute) for name in SCHEDULES})


def test_a_stack_whose_step_is_a_graph_has_whole_gradients_and_copies_of_them_as_of_the_rest() -> None:
    """No pass casts experts of its own there, and every gradient has its buffer before the first backward."""
    entries = (whole("alone", sharding, Recompute.NONE) for sharding in (Sharding.NONE, Sharding.OPTIMIZER))
    told = [cost.predict(replace(entry, job=replace(entry.job, software="xla"))).memory[0].parts for entry in entries]
    assert told[0][MemoryPart.GRADIENTS] == pytest.approx(told[0][MemoryPart.PARAMETERS])
    masters = told[1][MemoryPart.OPTIMIZER] / 2.0
    copies = told[0][MemoryPart.PARAMETERS] / 2.0
    assert told[1][MemoryPart.PARAMETERS] == pytest.approx(masters + copies)


def scored(layer: Layer, layout: Layout, *, documents: bool = False) -> Design:
    found = asked(layer, layout, length=4096, layers=2, vocab=512)
    return replace(found, job=replace(found.job, data=replace(found.job.data, document_mask=documents)))


CAPPED = replace(DENSE, mixer=replace(MIXER, softcap=50.0))
SUNK = replace(DENSE, mixer=replace(MIXER, sinks=True))


def test_peaks_of_scores_that_are_written_out_are_predicted() -> None:
    """For caps and for sinks: the softmax's gradient and what it makes of it lie beside what it gave."""
    again = Layout(shard=2, sharding=Sharding.OPTIMIZER, recompute=Recompute.FULL, batch=4)
    entries = {"capped": scored(CAPPED, again), "sunk": scored(SUNK, again)}
    entries["of documents"] = scored(SUNK, replace(again, recompute=Recompute.SELECTIVE), documents=True)
    hold(entries)
