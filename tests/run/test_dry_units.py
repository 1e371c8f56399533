"""Peaks of experts that are shards of other ranks than the rest of their layer, of halves of backwards along a V that
compute again, of the second layer of many, and of logits that fill two pieces; and what optimizers do there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.run.dry_run import dry_run
from meshwright.spec.optimizer import Muon, Optimizer, Sgd
from meshwright.spec.plan import Design, ExpertGrid, Recompute, ScheduleKind, Sharding
from meshwright.spec.report import LineName
from tests.run.test_dry_experts import SCHEDULES, WIDE
from tests.run.test_dry_memory import CHOSEN, DENSE, asked, hold
from tests.support.designs import Layout

PAIR, ALIKE = ExpertGrid(expert=2, tensor=1), ExpertGrid(expert=1, tensor=1)
TURNING = {
    "zb-v": Layout(pipeline=4, chunks=2, kind=ScheduleKind.ZERO_BUBBLE_V, shard=4, batch=32),
    "dualpipe-v": Layout(pipeline=4, chunks=2, kind=ScheduleKind.DUAL_PIPE_V, shard=4, batch=40),
}
QUICK = {
    "1f1b": (Sharding.OPTIMIZER, Recompute.FULL),
    "breadth-first": (Sharding.PARAMETERS, Recompute.NONE),
}
# Dealt to ranks of tensor and of context groups, to replicas, and among as many shards as the rest.
GROUPS = {
    "tensor": Layout(
        tensor=2, sequence_parallel=True, shard=4, experts=ExpertGrid(expert=2, tensor=2), pipeline=2, batch=16
    ),
    "context": Layout(context=2, shard=2, experts=PAIR, pipeline=2, batch=8),
    "replicas": Layout(replicate=2, shard=4, experts=PAIR, pipeline=2, batch=32),
    "as many shards": Layout(shard=4, experts=ALIKE, pipeline=2, batch=16),
}


# Whose every expert several ranks divide, of layers whose tokens weigh as much as their experts.
DIVIDED = {
    "two": Layout(tensor=2, sequence_parallel=True, shard=4, experts=ExpertGrid(expert=2, tensor=2), batch=64),
    "four": Layout(tensor=4, sequence_parallel=True, shard=4, experts=ExpertGrid(expert=1, tensor=4), batch=64),
    "four of half of them": Layout(
        tensor=4, sequence_parallel=True, shard=4, experts=ExpertGrid(expert=2, tensor=4), batch=64
    ),
}


def divided(name: str, sharding: Sharding, recompute: Recompute) -> Design:
    layout = replace(DIVIDED[name], microbatch=8, sharding=sharding, recompute=recompute)
    return asked(WIDE, layout, layers=4, vocab=512)


def units(schedule: str, sharding: Sharding, recompute: Recompute, *, layers: int = 8) -> Design:
    layout = replace(SCHEDULES[schedule], sharding=sharding, recompute=recompute, experts=PAIR)
    return asked(WIDE, layout, layers=layers)


def test_peaks_of_experts_that_are_units_of_their_own_are_predicted() -> None:
    hold({name: units(name, *ways, layers=4) for name, ways in QUICK.items()})


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_peaks_of_experts_of_their_own_are_so_in_every_schedule(sharding: Sharding, recompute: Recompute) -> None:
    hold({name: units(name, sharding, recompute) for name in SCHEDULES})


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_peaks_of_experts_of_their_own_are_so_in_every_group(recompute: Recompute) -> None:
    ways = (Sharding.GRADIENTS, Sharding.PARAMETERS)
    hold(
        {
            f"{name}, {sharding.value}": asked(WIDE, replace(layout, sharding=sharding, recompute=recompute))
            for name, layout in GROUPS.items()
            for sharding in ways
        }
    )


def test_peaks_of_experts_that_ranks_divide_have_the_choices_of_all_of_those() -> None:
    """In a layer that is computed again, and in the last layer's forward of one that is not."""
    hold(
        {
            "again": divided("two", Sharding.GRADIENTS, Recompute.FULL),
            "kept": divided("four", Sharding.PARAMETERS, Recompute.NONE),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [Sharding.GRADIENTS, Sharding.PARAMETERS])
@pytest.mark.parametrize("recompute", Recompute)
def test_peaks_of_experts_that_ranks_divide_are_so_in_every_way(sharding: Sharding, recompute: Recompute) -> None:
    hold({name: divided(name, sharding, recompute) for name in DIVIDED})


@pytest.mark.slow
def test_peaks_of_experts_beside_a_shared_branch_and_latent_attention_are_predicted() -> None:
    again = replace(GROUPS["tensor"], sharding=Sharding.PARAMETERS, recompute=Recompute.FULL)
    hold({"again": asked(CHOSEN, again), "kept": asked(CHOSEN, replace(again, recompute=Recompute.NONE))})


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS])
@pytest.mark.parametrize("experts", [None, PAIR, ExpertGrid(expert=4, tensor=1)])
def test_peaks_of_halves_along_a_v_that_computes_again_are_predicted(
    sharding: Sharding, experts: ExpertGrid | None
) -> None:
    """The last halves of a V: gradients of a layer as its half gave them and as they are sent."""
    layouts = (replace(each, sharding=sharding, experts=experts) for each in TURNING.values())
    layer = DENSE if experts is None else WIDE
    entries = (asked(layer, replace(each, recompute=Recompute.FULL), layers=16) for each in layouts)
    hold(dict(zip(TURNING, entries, strict=True)))


def test_the_second_layer_of_many_goes_back_beside_what_the_first_one_sends() -> None:
    """Of one that is last the gradients are small beside it: what is kept of layers before has not gone by then."""
    many = Layout(shard=8, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL, batch=8)
    hold({"many": asked(DENSE, many, layers=24, vocab=512)})


@pytest.mark.parametrize("tokens", [2**26 - 2**22, 2**26 + 2**22, 2**27 - 2**22, 2**27 + 2**24])
def test_logits_that_fill_one_piece_or_two_or_more_are_predicted(tokens: int) -> None:
    batch = tokens // (1024 * 16384)
    alone = Layout(shard=2, sharding=Sharding.OPTIMIZER, recompute=Recompute.FULL, microbatch=batch, batch=2 * batch)
    hold({str(tokens): asked(DENSE, alone, layers=1, vocab=round(tokens / 1024 / batch))})


def counted(optimizer: Optimizer) -> Design:
    found = asked(DENSE, Layout(shard=2, sharding=Sharding.OPTIMIZER, batch=2), layers=2, vocab=512)
    constraints = replace(found.job.constraints, devices="any")
    return replace(found, job=replace(found.job, optimizer=optimizer, constraints=constraints))


@pytest.mark.usefixtures("counted_in_turn")
@pytest.mark.parametrize("optimizer", [Sgd(), Sgd(momentum=0.0), Muon()])
def test_an_optimizer_is_counted_on_accelerators_as_predicted(optimizer: Optimizer) -> None:
    """Products that make matrices orthogonal are the optimizer's, and no part of a pass."""
    found = dry_run(counted(optimizer))
    gaps = {gap.name: gap for gap in found.gaps}
    for name in (LineName.FORWARD, LineName.BACKWARD):
        assert gaps[name].predicted == pytest.approx(gaps[name].measured, rel=1e-12), name
    if isinstance(optimizer, Muon):
        update = gaps[LineName.OPTIMIZER]
        assert update.predicted == pytest.approx(update.measured, rel=1e-12)
        assert update.measured > 0.0
    else:
        assert LineName.OPTIMIZER not in gaps
