"""Of learners that meet in rounds, what is kept and sent is predicted as a dry run counts it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.cost.traffic_rounds import round_traffic
from meshwright.run.dry.count import RankCount
from meshwright.run.dry_run import of_one_step
from meshwright.spec.cluster import Precision
from meshwright.spec.model import MatrixRank
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.ranks import factorable
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import GradientSync, SynchronizeSpec, SyncKind, usual_rounds
from tests.run import dry_cases
from tests.run.test_dry_memory import DENSE, asked, hold
from tests.support.designs import Layout

PLAIN = Layout(replicate=2, batch=2)
SHARDED = replace(PLAIN, shard=2, sharding=Sharding.PARAMETERS, batch=4)
PIPED = replace(PLAIN, pipeline=2, batch=4)
QUICK = (
    (SyncKind.DILOCO, Precision.BF16, PLAIN),
    (SyncKind.EAGER, Precision.INT8, SHARDED),
    (SyncKind.CO2, Precision.FP32, PLAIN),
    (SyncKind.STREAMING, Precision.INT4, PLAIN),
)


def of(cases: Iterable[tuple[SyncKind, Precision, Layout]], *, every: int = 8) -> dict[str, Design]:
    """Of parameters that are much more than a microbatch is, so that to meet takes the most memory."""
    entries = {}
    for kind, precision, layout in cases:
        entry = asked(DENSE, layout, length=64, layers=4)
        rounds = usual_rounds(kind, every=every, learners=2, precision=precision)
        plan = replace(entry.plan, gradients=GradientSync(kind=kind, rounds=rounds))
        entries[f"{kind.value} {precision.value} {plan.describe()}"] = replace(entry, plan=plan)
    return entries


def check_traffic(entries: dict[str, Design], found: list[list[RankCount]]) -> None:
    for (name, entry), counts in zip(entries.items(), found, strict=True):
        for count in counts:
            told = dict(cost.traffic(entry, rank=count.rank).bytes)
            assert told == pytest.approx(of_one_step(entry, count.bytes), rel=1e-12), (name, count.rank)


def test_what_learners_keep_and_send_is_predicted() -> None:
    entries = of(QUICK)
    check_traffic(entries, hold(entries))


def test_so_is_what_ranks_of_a_learner_sum_and_what_learners_tell_each_other() -> None:
    """Two norms of co2, how many steps a round is to have where that may change, and seven numbers every 16 steps."""
    fixed = of([(SyncKind.CO2, Precision.FP32, SHARDED), (SyncKind.EAGER, Precision.INT8, PIPED)], every=48)
    free = {
        f"free {name}": replace(entry, job=replace(entry.job, synchronize=SynchronizeSpec(kinds=tuple(SyncKind))))
        for name, entry in fixed.items()
    }
    entries = fixed | free
    found: list[list[RankCount]] = dry_cases.apart(dry_cases.count_whole, designs=list(entries.values()))
    check_traffic(entries, found)
    co2, eager, free_co2, free_eager = (dict(cost.traffic(entry, rank=0).bytes) for entry in entries.values())
    assert co2["other|all_reduce|replicate"] == eager["other|all_reduce|replicate"] == 56 / 16
    assert co2[f"{LineName.OUTER}|all_reduce|shard"] == 8 / 48
    assert free_co2[f"{LineName.OUTER}|all_reduce|shard"] == 16 / 48
    assert free_eager[f"{LineName.OUTER}|all_reduce|pipeline"] == 8 / 48
    assert f"{LineName.OUTER}|all_reduce|pipeline" not in eager


def test_every_stage_of_learners_sends_what_it_has_of_a_fragment() -> None:
    entries = of([(SyncKind.STREAMING, Precision.FP8, PIPED)])
    found: list[list[RankCount]] = dry_cases.apart(dry_cases.count_whole, designs=list(entries.values()))
    check_traffic(entries, found)


def thin(entry: Design) -> tuple[Design, int]:
    """The same, of a model whose first layer has factors of a quarter of full rank, and the elements that saves."""
    shapes = sorted(factorable(entry.model.layers[0].places).items())
    ranks = tuple(MatrixRank(name=name, rank=min(shape) // 4) for name, shape in shapes)
    saved = sum(
        rows * columns - each.rank * (rows + columns) for each, (_, (rows, columns)) in zip(ranks, shapes, strict=True)
    )
    return replace(entry, model=entry.model.with_ranks({1: ranks})), saved


def test_learners_of_thin_factors_keep_and_send_what_those_have() -> None:
    entries = {name: thin(entry)[0] for name, entry in of(QUICK).items()}
    check_traffic(entries, hold(entries))


def test_a_round_of_thin_factors_is_shorter_by_what_they_save() -> None:
    """Of W (m, n) as U (m, r) and V (r, n) r (m + n) elements cross, and not m n."""
    (dense,) = of([(SyncKind.DILOCO, Precision.FP32, PLAIN)]).values()
    low, saved = thin(dense)
    sent, before = (
        sum(each.bytes for each in round_traffic(entry, rank=0) if each.fragment is not None) for entry in (low, dense)
    )
    assert saved > 0
    assert before == 4 * dense.model.parameters
    assert sent == before - 4 * saved


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT4])
def test_whatever_their_way_is(precision: Precision) -> None:
    entries = of((kind, precision, PLAIN) for kind in SyncKind if kind.has_learners)
    check_traffic(entries, hold(entries))
