"""The longest path through a schedule against the event simulation and one action at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.longest_path import Path, longest_path, played_microbatches
from meshwright.cost.simulate import makespan as played_seconds
from meshwright.cost.simulate import simulate
from meshwright.schedule import NAMED, build, needs, planned
from meshwright.schedule.table import Work
from meshwright.spec.plan import Schedule, ScheduleKind
from tests.cost.pipeline_cases import chunks_of, closed, played, stage_rows, stages_of

INTERLEAVED = ScheduleKind.INTERLEAVED


def followed(kind, *, pipeline, chunks, microbatches, slices=1, **seconds):
    """The path of one plan."""
    stages = stage_rows(stages_of(kind, pipeline=pipeline, chunks=chunks, **seconds))
    entry = Schedule(kind=kind, chunks=chunks, microbatches=microbatches, slices=slices)
    return longest_path(entry, stages=stages, pipeline=pipeline)


@given(
    pipeline=st.integers(2, 6),
    chunks=st.integers(2, 4),
    rounds=st.integers(1, 12),
    spread=st.sampled_from([0.05, 0.1, 0.3]),
    seed=st.integers(0, 2**16),
    transfer=st.sampled_from([0.0, 0.02, 0.1, 10.0]),
)
@settings(max_examples=25)
def test_the_longest_path_of_uneven_interleaved_stages(pipeline, chunks, rounds, spread, seed, transfer):
    forward = (1.0 + spread * np.random.default_rng(seed).uniform(-1.0, 1.0, pipeline * chunks)).tolist()
    case = {
        "pipeline": pipeline,
        "chunks": chunks,
        "microbatches": pipeline * rounds,
        "forward": forward,
        "backward": [2.0 * seconds for seconds in forward],
        "transfer": transfer,
    }
    path = followed(INTERLEAVED, **case)
    assert path.still <= path.moving
    assert path.exact.all()
    _, seconds = path.instead(np.zeros(1), np.array([closed(INTERLEAVED, **case)]))
    assert float(seconds[0]) == pytest.approx(played(INTERLEAVED, **case), rel=1e-12)


def test_a_path_that_was_not_followed_to_its_end_counts_where_it_is_longer():
    """Both are too short; where nothing was followed there is the closed form alone."""
    path = Path.unknown(4)
    found = Path(still=np.array([5.0, 5.0]), moving=np.array([7.0, 7.0]), exact=np.array([True, False]))
    path.set(np.array([0, 1]), found)
    path.set(np.array([2]), Path(still=np.array([9.0]), moving=np.array([9.0]), exact=np.array([False])))
    still, moving = path.instead(np.full(4, 6.0), np.full(4, 8.0))
    assert still.tolist() == [5.0, 6.0, 9.0, 6.0]
    assert moving.tolist() == [7.0, 8.0, 9.0, 8.0]
    assert path.take(slice(1, 3)).moving.tolist() == [7.0, 9.0]


@pytest.mark.parametrize("kind", NAMED)
def test_plans_followed_together_are_those_followed_alone(kind):
    chunks, rng = chunks_of(kind), np.random.default_rng(5)
    slices = 3 if kind is ScheduleKind.SEQUENCE_1F1B else 1
    entry = Schedule(kind=kind, chunks=chunks, microbatches=12, slices=slices)
    plans = []
    for transfer in (0.0, 0.1, 20.0):
        forward = rng.uniform(0.5, 1.5, 4 * chunks)
        seconds = {"forward": forward.tolist(), "backward": (2.5 * forward).tolist(), "transfer": transfer}
        plans.append(stages_of(kind, pipeline=4, chunks=chunks, weight_share=0.3, **seconds))
    together = longest_path(entry, stages=stage_rows(*plans), pipeline=4)
    for row, plan in enumerate(plans):
        alone = longest_path(entry, stages=stage_rows(plan), pipeline=4)
        assert together.still[row] == alone.still[0]
        assert together.moving[row] == alone.moving[0]
    assert together.still[0] == together.moving[0]
    assert together.still[2] < together.moving[2]


@pytest.mark.parametrize("slow", [0.05, 20.0])
@pytest.mark.parametrize("microbatches", [91, 96])
@pytest.mark.parametrize("pipeline", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", NAMED)
def test_a_schedule_too_long_to_play_is_followed_for_some_rounds(kind, pipeline, microbatches, slow, monkeypatch):
    """Whole cycles are added, so that a link twenty times as slow as the work changes nothing, but for breadth-first:
    its microbatches hide the way around the ranks only when they are many, as its closed form knows.
    """
    if kind is INTERLEAVED:
        microbatches = 20 * pipeline
    chunks, rng = chunks_of(kind), np.random.default_rng(3)
    forward = rng.uniform(0.8, 1.2, pipeline * chunks).tolist()
    between = [0.05] * (pipeline - 1)
    between[(pipeline - 1) // 2] = slow
    seconds = {"forward": forward, "backward": [2.0 * each for each in forward], "transfer": between}
    sizes = {"pipeline": pipeline, "chunks": chunks, "microbatches": microbatches}
    monkeypatch.setattr("meshwright.cost.longest_path.MOST_ACTIONS", 100)
    path = followed(kind, **sizes, **seconds)
    assert not path.exact.any()
    found = path.moving
    if kind is ScheduleKind.BREADTH_FIRST:
        _, found = path.instead(np.zeros(1), np.array([closed(kind, **sizes, **seconds)]))
    assert found[0] == pytest.approx(played(kind, **sizes, **seconds), rel=0.01)


@pytest.mark.parametrize(
    ("kind", "pipeline", "microbatches"),
    [(ScheduleKind.ONE_F_ONE_B, 16, 12_005), (INTERLEAVED, 8, 11_000), (ScheduleKind.ZERO_BUBBLE_H2, 8, 21_001)],
)
def test_a_path_of_more_than_half_a_million_actions(kind, pipeline, microbatches):
    chunks, rng = chunks_of(kind), np.random.default_rng(9)
    forward = rng.uniform(0.7, 1.3, pipeline * chunks)
    between = [0.02] * (pipeline - 1)
    between[pipeline // 2] = 3.0
    seconds = {"forward": forward.tolist(), "backward": (2.0 * forward).tolist(), "transfer": between}
    sizes = {"pipeline": pipeline, "chunks": chunks, "microbatches": microbatches}
    path = followed(kind, **sizes, **seconds)
    assert not path.exact.any()
    assert path.moving[0] == pytest.approx(played(kind, **sizes, **seconds), rel=0.002)


@given(
    pipeline=st.integers(1, 64),
    chunks=st.integers(1, 4),
    microbatches=st.integers(1, 100_000),
    slices=st.integers(1, 4),
)
@settings(max_examples=100)
def test_what_is_left_out_of_a_long_path_is_whole_cycles(pipeline, chunks, microbatches, slices):
    entry = Schedule(chunks=chunks, microbatches=microbatches, slices=slices)
    fewer, more = played_microbatches(entry, pipeline=pipeline)
    assert 1 <= fewer <= more <= microbatches
    if fewer == more:
        assert more == microbatches
        return
    assert fewer >= 6 * pipeline
    assert (more - fewer) % pipeline == (more - fewer) % 6 == 0
    assert (microbatches - more) % (more - fewer) == 0


def one_by_one(table, *, stages, slices):
    """When the last action ends, each action timed alone from what `needs` says."""
    ends, clocks, places = {}, [0.0] * len(table), [0] * len(table)
    while any(place < len(row) for place, row in zip(places, table, strict=True)):
        for rank, row in enumerate(table):
            while places[rank] < len(row):
                action = row[places[rank]]
                wanted = needs(action, stages=len(stages), slices=slices)
                if any(key not in ends for key in wanted):
                    break
                ways = [
                    stages[min(key[1], action.stage)].transfer / slices if key[1] != action.stage else 0.0
                    for key in wanted
                ]
                arrivals = [ends[key] + way for key, way in zip(wanted, ways, strict=True)]
                clocks[rank] = max([clocks[rank], *arrivals]) + stages[action.stage].of(action.work) / slices
                work = Work.BACKWARD if action.work is Work.INPUT else action.work
                ends[work, action.stage, action.microbatch, action.slice] = clocks[rank]
                places[rank] += 1
    return max(clocks)


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("microbatches", [8, 12])
def test_the_longest_path_of_every_schedule_is_its_simulation_one_action_at_a_time(kind, microbatches):
    chunks, slices = chunks_of(kind), 3 if kind is ScheduleKind.SEQUENCE_1F1B else 1
    sizes = {"pipeline": 4, "chunks": chunks, "microbatches": microbatches, "slices": slices}
    forward = np.random.default_rng(microbatches).uniform(0.5, 1.5, 4 * chunks)
    seconds = {"forward": forward.tolist(), "backward": (2.5 * forward).tolist(), "transfer": 0.1}
    stages = stages_of(kind, pipeline=4, chunks=chunks, weight_share=0.3, **seconds)
    table, entry = build(kind, **sizes), Schedule(kind=kind, chunks=chunks, microbatches=microbatches, slices=slices)
    path = longest_path(entry, stages=stage_rows(stages), pipeline=4)
    assert path.moving[0] == pytest.approx(one_by_one(table, stages=stages, slices=slices), rel=1e-12)
    assert path.moving[0] == pytest.approx(played_seconds(simulate(table, stages=stages)), rel=1e-12)
    if slices == 1:
        told = longest_path(planned.of(table, chunks=chunks), stages=stage_rows(stages), pipeline=4)
        assert told.moving[0] == path.moving[0]
