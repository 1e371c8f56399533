"""The closed form against the event simulation, even and uneven stages, with and without transfers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.longest_path import longest_path
from meshwright.cost.pipeline import RankSeconds, Shape, held, makespan
from meshwright.cost.simulate import StageSeconds, simulate
from meshwright.cost.simulate import makespan as played_seconds
from meshwright.cost.table import SCHEDULES
from meshwright.schedule.build import build
from meshwright.schedule.table import Work, in_flight
from meshwright.spec.plan import ScheduleKind

GPIPE, ONE_F_ONE_B, INTERLEAVED = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED


def closed(kind, *, pipeline, chunks, microbatches, forward, backward, transfer, shown=None):
    shown = np.arange(pipeline) if shown is None else np.asarray(shown)

    def ranks(seconds):
        grid = np.reshape(np.asarray(seconds, dtype=np.float64), (chunks, pipeline))
        return RankSeconds(
            total=grid.sum(axis=0)[None, shown],
            first=grid[0][None, shown],
            last=grid[-1][None, shown],
            first_upto=np.cumsum(grid[0])[None, shown],
            last_upto=np.cumsum(grid[-1])[None, shown],
            everything=np.array([grid.sum()]),
        )

    shape = Shape(
        schedule=np.array([SCHEDULES.index(kind)]),
        pipeline=np.array([float(pipeline)]),
        chunks=np.array([float(chunks)]),
        microbatches=np.array([float(microbatches)]),
        rank=shown[None],
        valid=np.ones((1, len(shown)), dtype=np.bool_),
    )
    reach = transfer * shown[None].astype(np.float64)
    return float(makespan(shape, forward=ranks(forward), backward=ranks(backward), reach=reach)[0])


def played(kind, *, pipeline, chunks, microbatches, forward, backward, transfer):
    table = build(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches)
    stages = [StageSeconds(forward=f, backward=b, transfer=transfer) for f, b in zip(forward, backward, strict=True)]
    return played_seconds(simulate(table, stages=stages))


@given(
    pipeline=st.integers(1, 8),
    microbatches=st.integers(1, 24),
    kind=st.sampled_from([GPIPE, ONE_F_ONE_B]),
    ratio=st.sampled_from([1.0, 2.0, 3.0]),
    transfer=st.sampled_from([0.0, 0.02, 0.05]),
)
@settings(max_examples=25, deadline=None)
def test_even_stages(pipeline, microbatches, kind, ratio, transfer):
    case = {
        "pipeline": pipeline,
        "chunks": 1,
        "microbatches": microbatches,
        "forward": [1.0] * pipeline,
        "backward": [ratio] * pipeline,
        "transfer": transfer,
    }
    assert closed(kind, **case) == pytest.approx(played(kind, **case), rel=0.01)


@given(
    pipeline=st.integers(2, 6),
    chunks=st.integers(2, 4),
    rounds=st.integers(1, 4),
    ratio=st.sampled_from([1.0, 2.0, 3.0]),
    transfer=st.sampled_from([0.0, 0.02, 0.1]),
)
@settings(max_examples=20, deadline=None)
def test_even_stages_interleaved(pipeline, chunks, rounds, ratio, transfer):
    stages = pipeline * chunks
    case = {
        "pipeline": pipeline,
        "chunks": chunks,
        "microbatches": pipeline * rounds,
        "forward": [1.0] * stages,
        "backward": [ratio] * stages,
        "transfer": transfer,
    }
    assert closed(INTERLEAVED, **case) == pytest.approx(played(INTERLEAVED, **case), rel=1e-9)


@given(
    pipeline=st.integers(2, 8),
    rounds=st.integers(1, 4),
    kind=st.sampled_from([GPIPE, ONE_F_ONE_B]),
    costs=st.lists(st.sampled_from([0.9, 1.0, 1.1]), min_size=8, max_size=8),
    head=st.floats(0.0, 1.0),
    ratio=st.sampled_from([1.0, 2.0, 3.0]),
)
@settings(max_examples=25, deadline=None)
def test_uneven_stages(pipeline, rounds, kind, costs, head, ratio):
    forward = costs[:pipeline]
    forward[-1] += head
    case = {
        "pipeline": pipeline,
        "chunks": 1,
        "microbatches": pipeline * rounds,
        "forward": forward,
        "backward": [ratio * seconds for seconds in forward],
        "transfer": 0.02,
    }
    assert closed(kind, **case) == pytest.approx(played(kind, **case), rel=0.01)


@given(
    pipeline=st.integers(2, 6),
    chunks=st.integers(2, 4),
    rounds=st.integers(1, 4),
    head=st.floats(0.0, 0.8),
    embedding=st.floats(0.0, 0.05),
)
@settings(max_examples=20, deadline=None)
def test_uneven_ends_interleaved(pipeline, chunks, rounds, head, embedding):
    forward = [1.0] * (pipeline * chunks)
    forward[0] += embedding
    forward[-1] += head
    case = {
        "pipeline": pipeline,
        "chunks": chunks,
        "microbatches": pipeline * rounds,
        "forward": forward,
        "backward": [2.0 * seconds for seconds in forward],
        "transfer": 0.02,
    }
    assert closed(INTERLEAVED, **case) == pytest.approx(played(INTERLEAVED, **case), rel=0.01)


@given(
    pipeline=st.integers(2, 6),
    chunks=st.integers(2, 4),
    rounds=st.integers(1, 12),
    spread=st.sampled_from([0.05, 0.1, 0.3]),
    seed=st.integers(0, 2**16),
    transfer=st.sampled_from([0.0, 0.02, 0.1]),
)
@settings(max_examples=25, deadline=None)
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
    stages = [StageSeconds(forward=f, backward=2.0 * f, transfer=transfer) for f in forward]
    sizes = {"pipeline": pipeline, "chunks": chunks, "microbatches": pipeline * rounds}
    path = longest_path(INTERLEAVED, stages=stages, **sizes)
    assert path.still <= path.moving
    assert path.exact is (rounds <= 6)
    _, seconds = path.instead(np.zeros(1), np.array([closed(INTERLEAVED, **case)]))
    assert float(seconds[0]) == pytest.approx(played(INTERLEAVED, **case), rel=1e-12 if path.exact else 0.01)


@pytest.mark.parametrize("kind", [GPIPE, ONE_F_ONE_B])
def test_the_longest_path_of_other_schedules_is_the_simulation(kind):
    stages = [StageSeconds(forward=f, backward=2.5 * f, transfer=0.1) for f in (1.0, 1.2, 0.9, 1.6)]
    path = longest_path(kind, stages=stages, pipeline=4, chunks=1, microbatches=11)
    table = build(kind, pipeline=4, chunks=1, microbatches=11)
    assert path.moving == pytest.approx(played_seconds(simulate(table, stages=stages)), rel=1e-12)


@pytest.mark.parametrize(("kind", "chunks"), [(GPIPE, 1), (ONE_F_ONE_B, 1), (INTERLEAVED, 3)])
def test_equal_ranks_may_be_shown_by_the_ends_of_their_run(kind, chunks):
    forward = [1.0] * (8 * chunks)
    forward[0], forward[-1] = 1.2, 1.6
    case = {
        "pipeline": 8,
        "chunks": chunks,
        "microbatches": 16,
        "forward": forward,
        "backward": [2.0 * seconds for seconds in forward],
        "transfer": 0.03,
    }
    assert closed(kind, **case, shown=[0, 1, 6, 7]) == pytest.approx(closed(kind, **case), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "chunks"), [(GPIPE, 1), (ONE_F_ONE_B, 1), (INTERLEAVED, 2), (INTERLEAVED, 4), (INTERLEAVED, 1)]
)
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_activations_held_are_those_of_the_table(kind, chunks, microbatches):
    pipeline = 4
    table = build(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches)
    ones = np.ones((1, pipeline))
    shape = Shape(
        schedule=np.array([SCHEDULES.index(kind)]),
        pipeline=np.array([float(pipeline)]),
        chunks=np.array([float(chunks)]),
        microbatches=np.array([float(microbatches)]),
        rank=np.arange(pipeline)[None],
        valid=np.ones((1, pipeline), dtype=np.bool_),
    )
    counted = held(shape, first=ones, last=ones, total=chunks * ones)[0]
    assert counted.tolist() == list(in_flight(table))


def test_the_simulation_splits_backwards_and_starts_nothing_before_its_input():
    table = build(ONE_F_ONE_B, pipeline=3, chunks=1, microbatches=5)
    stages = [StageSeconds(forward=1.0, backward=2.0, transfer=0.25)] * 3
    events = simulate(table, stages=stages)
    assert len(events) == 30
    ends = {(e.action.work, e.action.stage, e.action.microbatch): e.start + e.seconds for e in events}
    for event in events:
        stage, microbatch = event.action.stage, event.action.microbatch
        if event.action.work is Work.FORWARD and stage:
            assert event.start >= ends[Work.FORWARD, stage - 1, microbatch] + 0.25 - 1e-12
        assert event.waited >= 0.0
    assert stages[0].of(Work.INPUT) + stages[0].of(Work.WEIGHT) == pytest.approx(2.0)
