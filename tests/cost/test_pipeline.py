"""The closed form against the event simulation, even and uneven stages, with and without transfers."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.longest_path import longest_path
from meshwright.cost.pipeline import RankSeconds, Shape, held, makespan
from meshwright.cost.simulate import StageSeconds, play, simulate
from meshwright.cost.simulate import makespan as played_seconds
from meshwright.cost.table import SCHEDULES
from meshwright.schedule import build, graph, needs, placement, program
from meshwright.schedule.build import LOOPS, V_SHAPES
from meshwright.schedule.table import Work
from meshwright.spec.plan import ScheduleKind

GPIPE, ONE_F_ONE_B, INTERLEAVED = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED


def ranks_of(kind, sizes, *, pipeline, chunks, shown):
    """What a rank has of `sizes` by stage, for the ranks shown."""
    places = np.array(placement(kind, pipeline=pipeline, chunks=chunks))
    sizes = np.asarray(sizes, dtype=np.float64)
    first, last = sizes[:pipeline], sizes[-pipeline:][np.argsort(places[-pipeline:])]
    return RankSeconds(
        total=np.bincount(places, weights=sizes)[None, shown],
        first=first[None, shown],
        last=last[None, shown],
        first_upto=np.cumsum(first)[None, shown],
        last_upto=np.cumsum(last)[None, shown],
        everything=np.array([sizes.sum()]),
    )


def shape_of(kind, *, pipeline, chunks, microbatches, slices=1, shown):
    return Shape(
        schedule=np.array([SCHEDULES.index(kind)]),
        pipeline=np.array([float(pipeline)]),
        chunks=np.array([float(chunks)]),
        microbatches=np.array([float(microbatches)]),
        rank=shown[None],
        valid=np.ones((1, len(shown)), dtype=np.bool_),
        slices=np.array([float(slices)]),
    )


def closed(kind, *, forward, backward, transfer, shown=None, weight_share=None, **sizes):
    shown = np.arange(sizes["pipeline"]) if shown is None else np.asarray(shown)

    def ranks(seconds):
        return ranks_of(kind, seconds, pipeline=sizes["pipeline"], chunks=sizes["chunks"], shown=shown)

    weight = None if weight_share is None else ranks(np.multiply(backward, weight_share))
    reach = transfer * shown[None].astype(np.float64)
    shape = shape_of(kind, shown=shown, **sizes)
    return float(makespan(shape, forward=ranks(forward), backward=ranks(backward), reach=reach, weight=weight)[0])


def stages_of(kind, *, pipeline, chunks, forward, backward, transfer, weight_share=None):
    places = placement(kind, pipeline=pipeline, chunks=chunks)
    ways = [transfer * (rank != after) for rank, after in zip(places, [*places[1:], places[-1]], strict=True)]
    share = 1.0 - (0.5 if weight_share is None else weight_share)
    return [
        StageSeconds(forward=f, backward=b, transfer=way, input_share=share)
        for f, b, way in zip(forward, backward, ways, strict=True)
    ]


def played(kind, *, pipeline, chunks, microbatches, slices=1, **seconds):
    made = program(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches, slices=slices)
    return play(graph(made), stages=stages_of(kind, pipeline=pipeline, chunks=chunks, **seconds)).makespan


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
    embedding=st.floats(0.0, 0.1),
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
    assert path.exact
    _, seconds = path.instead(np.zeros(1), np.array([closed(INTERLEAVED, **case)]))
    assert float(seconds[0]) == pytest.approx(played(INTERLEAVED, **case), rel=1e-12)


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_a_schedule_too_long_to_play_is_followed_for_some_rounds(kind, monkeypatch):
    chunks, rng = chunks_of(kind), np.random.default_rng(3)
    forward = rng.uniform(0.8, 1.2, 4 * chunks).tolist()
    seconds = {"forward": forward, "backward": [2.0 * each for each in forward], "transfer": 0.05}
    sizes = {"pipeline": 4, "chunks": chunks, "microbatches": 48}
    stages = stages_of(kind, pipeline=4, chunks=chunks, **seconds)
    monkeypatch.setattr("meshwright.cost.longest_path.MOST_ACTIONS", 100)
    path = longest_path(kind, stages=stages, **sizes)
    assert not path.exact
    assert path.moving == pytest.approx(played(kind, **sizes, **seconds), rel=0.01)


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


@pytest.mark.parametrize("kind", list(ScheduleKind))
@pytest.mark.parametrize("microbatches", [8, 12])
def test_the_longest_path_of_every_schedule_is_its_simulation_one_action_at_a_time(kind, microbatches):
    chunks, slices = chunks_of(kind), 3 if kind is ScheduleKind.SEQUENCE_1F1B else 1
    sizes = {"pipeline": 4, "chunks": chunks, "microbatches": microbatches, "slices": slices}
    forward = np.random.default_rng(microbatches).uniform(0.5, 1.5, 4 * chunks)
    seconds = {"forward": forward.tolist(), "backward": (2.5 * forward).tolist(), "transfer": 0.1}
    stages = stages_of(kind, pipeline=4, chunks=chunks, weight_share=0.3, **seconds)
    path, table = longest_path(kind, stages=stages, **sizes), build(kind, **sizes)
    assert path.moving == pytest.approx(one_by_one(table, stages=stages, slices=slices), rel=1e-12)
    assert path.moving == pytest.approx(played_seconds(simulate(table, stages=stages)), rel=1e-12)


def chunks_of(kind):
    return 2 if kind in LOOPS | V_SHAPES else 1


# The largest share by which each closed form may fall short of and exceed the simulation, and what share of random
# stages may be told wrong by more than a hundredth.
MISSES = {
    ScheduleKind.GPIPE: (1e-9, 1e-9, 0.0),
    ScheduleKind.ONE_F_ONE_B: (0.02, 1e-9, 0.05),
    ScheduleKind.SEQUENCE_1F1B: (0.02, 0.01, 0.05),
    ScheduleKind.BREADTH_FIRST: (0.08, 1e-9, 0.3),
    ScheduleKind.ZERO_BUBBLE_H1: (0.02, 0.01, 0.05),
    ScheduleKind.ZERO_BUBBLE_H2: (0.02, 0.01, 0.05),
    ScheduleKind.ZERO_BUBBLE_V: (0.03, 0.01, 0.1),
    ScheduleKind.DUAL_PIPE_V: (0.05, 0.01, 0.2),
    ScheduleKind.INTERLEAVED: (0.12, 1e-9, 0.7),
}


@pytest.mark.parametrize("kind", list(MISSES))
def test_closed_forms_of_random_stages(kind):
    rng, (short, long, misses) = np.random.default_rng(7), MISSES[kind]
    errors = []
    for _ in range(60):
        pipeline, chunks = int(rng.integers(2, 9)), chunks_of(kind)
        forward = 1.0 + 0.3 * rng.uniform(-1.0, 1.0, pipeline * chunks)
        case = {
            "pipeline": pipeline,
            "chunks": chunks,
            "microbatches": pipeline * int(rng.integers(2, 7)),
            "slices": int(rng.integers(1, 5)) if kind is ScheduleKind.SEQUENCE_1F1B else 1,
            "forward": forward.tolist(),
            "backward": (rng.choice([1.5, 2.0, 3.0]) * forward).tolist(),
            "transfer": rng.choice([0.0, 0.02, 0.1]),
            "weight_share": rng.choice([0.4, 0.5, 0.6]),
        }
        errors.append(closed(kind, **case) / played(kind, **case) - 1.0)
    assert -short <= min(errors)
    assert max(errors) <= long
    assert np.mean(np.abs(errors) > 0.01) <= misses


@pytest.mark.parametrize("kind", list(MISSES))
@given(
    pipeline=st.integers(2, 8),
    rounds=st.integers(2, 5),
    embedding=st.floats(0.0, 0.1),
    head=st.floats(0.0, 0.8),
    transfer=st.sampled_from([0.0, 0.02]),
)
@settings(max_examples=12, deadline=None)
def test_closed_forms_of_layers_with_an_embedding_and_a_head(kind, pipeline, rounds, embedding, head, transfer):
    forward = [1.0] * (pipeline * chunks_of(kind))
    forward[0] += embedding
    forward[-1] += head
    case = {
        "pipeline": pipeline,
        "chunks": chunks_of(kind),
        "microbatches": pipeline * rounds,
        "forward": forward,
        "backward": [2.0 * seconds for seconds in forward],
        "transfer": transfer,
    }
    loose = kind is ScheduleKind.DUAL_PIPE_V
    assert closed(kind, **case) == pytest.approx(played(kind, **case), rel=0.03 if loose else 0.01)


def test_rows_of_unlike_schedules_are_priced_as_each_alone():
    kinds, sizes, shown = list(MISSES), {"pipeline": 4, "chunks": 2, "microbatches": 12}, np.arange(4)
    singles = [ranks_of(kind, np.arange(1.0, 9.0), pipeline=4, chunks=2, shown=shown) for kind in kinds]
    shapes = [shape_of(kind, shown=shown, **sizes) for kind in kinds]

    def joined(parts, of):
        return of(**{each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(of)})

    reach, seconds = 0.1 * np.arange(4.0)[None], joined(singles, RankSeconds)
    together = makespan(joined(shapes, Shape), forward=seconds, backward=seconds, reach=np.repeat(reach, 9, axis=0))
    for shape, single, found in zip(shapes, singles, together, strict=True):
        alone = makespan(shape, forward=single, backward=single, reach=reach)
        assert float(alone[0]) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [
        (GPIPE, 1),
        (ONE_F_ONE_B, 1),
        (INTERLEAVED, 3),
        (ScheduleKind.BREADTH_FIRST, 3),
        (ScheduleKind.ZERO_BUBBLE_H1, 1),
        (ScheduleKind.ZERO_BUBBLE_H2, 1),
        (ScheduleKind.ZERO_BUBBLE_V, 2),
        (ScheduleKind.DUAL_PIPE_V, 2),
        (ScheduleKind.SEQUENCE_1F1B, 1),
    ],
)
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


@given(
    kind=st.sampled_from(list(ScheduleKind)),
    pipeline=st.integers(1, 8),
    chunks=st.integers(1, 4),
    microbatches=st.integers(1, 30),
    slices=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_activations_held_are_those_of_the_table(kind, pipeline, chunks, microbatches, slices, seed):
    chunks = 2 if kind in V_SHAPES else chunks if kind in LOOPS else 1
    slices = slices if kind is ScheduleKind.SEQUENCE_1F1B else 1
    microbatches += 2 * pipeline if kind is ScheduleKind.DUAL_PIPE_V else 0
    microbatches *= pipeline if kind is INTERLEAVED else 1
    rng = np.random.default_rng(seed)
    kept = np.full((chunks, pipeline), rng.uniform(0.5, 1.5))
    kept[0], kept[-1] = rng.uniform(0.5, 1.5, (2, pipeline))
    sizes, shown = {"pipeline": pipeline, "chunks": chunks}, np.arange(pipeline)
    ranks = ranks_of(kind, kept.ravel(), shown=shown, **sizes)
    shape = shape_of(kind, microbatches=microbatches, slices=slices, shown=shown, **sizes)
    counted = held(shape, first=ranks.first, last=ranks.last, total=ranks.total)[0]
    signs = {Work.FORWARD: 1.0, Work.INPUT: 0.0, Work.BACKWARD: -1.0, Work.WEIGHT: -1.0}
    peaks = [
        np.cumsum([signs[action.work] * kept.ravel()[action.stage] / slices for action in row]).max()
        for row in build(kind, microbatches=microbatches, slices=slices, **sizes)
    ]
    assert counted.tolist() == pytest.approx(peaks, rel=1e-9)


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
