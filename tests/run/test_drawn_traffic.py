"""The bytes of every collective of every plan that the parity machine draws are predicted exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.search import Scope
from meshwright.search import check as refusals
from meshwright.spec.cluster import Precision
from meshwright.spec.compression import AcpSgd, DeMo, OneBit, PowerSgd, TopK
from meshwright.spec.optimizer import Adafactor
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import GradientSync
from tests.parallel import draws, fixing, path_cases
from tests.parallel.drawn import FIXED
from tests.parallel.draws import Draw
from tests.run import dry_cases

RUNS = 20
KINDS = (PowerSgd(rank=2), AcpSgd(rank=2, start_step=3), TopK(share=0.03), DeMo(), OneBit())
EIGHT_BITS = (Precision.FP8, Precision.INT8)
ALONE = ("factored", "shards", "extents")
FEW = [*FIXED[:7], *(next(filter(lambda draw: getattr(draw, name), FIXED[7:])) for name in ALONE)]


def check(chosen: Sequence[Draw]) -> None:
    compare([(str(draw), draws.build(draw)) for draw in chosen])


def compare(named: Sequence[tuple[str, Design]]) -> None:
    """Lines, operations, axes and bytes of one pipeline rank of each design: another one from one to the next."""
    designs = [entry for _, entry in named]
    ranks = [place % entry.plan.pipeline for place, entry in enumerate(designs)]
    found = dry_cases.apart(dry_cases.count_ranks, designs=designs, ranks=ranks)
    for (name, entry), rank, counted in zip(named, ranks, found, strict=True):
        assert dict(cost.traffic(entry, rank=rank).bytes) == dict(counted.bytes), (name, rank)


def changed(chosen: Sequence[Draw]) -> list[tuple[str, Design]]:
    """The same plans under Adafactor, and with gradients in eight bits or compressed where those are legal."""
    found = []
    for place, draw in enumerate(chosen):
        entry = draws.build(draw)
        adafactor = Adafactor(learning_rate=1e-2, clip_norm=draw.clip_norm)
        narrow = GradientSync(precision=EIGHT_BITS[place % 2])
        small = GradientSync(compression=KINDS[place % len(KINDS)])
        others = {
            "adafactor": replace(entry, job=replace(entry.job, optimizer=adafactor)),
            "eight bits": replace(entry, plan=replace(entry.plan, gradients=narrow)),
            "compressed": replace(entry, plan=replace(entry.plan, gradients=small)),
        }
        scopes = frozenset({Scope.PLAN, Scope.RUNTIME})
        found += [(f"{how} {draw}", other) for how, other in others.items() if not refusals(other, scopes=scopes)]
    return found


def test_every_byte_of_a_few_drawn_plans_is_predicted() -> None:
    others = changed([draw for draw in FIXED if draw.ranks > 1])
    ways = ("adafactor", "eight bits", "compressed")
    few = [[pair for pair in others if pair[0].startswith(how)][:2] for how in ways]
    assert all(few)
    paths = [(f"paths {place}", path_cases.on(*path_cases.CASES[place])) for place in (0, 3, 5)]
    compare([*((str(draw), draws.build(draw)) for draw in FEW), *(pair for found in few for pair in found), *paths])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, fixing.COUNT, RUNS))
def test_every_byte_of_every_drawn_plan_is_predicted(start: int) -> None:
    check(fixing.every()[start : start + RUNS])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, fixing.COUNT, RUNS))
def test_every_byte_of_every_plan_so_changed_is(start: int) -> None:
    compare(changed(fixing.every()[start : start + RUNS]))
