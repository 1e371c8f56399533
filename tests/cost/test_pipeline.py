"""The closed form against the event simulation, even and uneven stages, with and without transfers."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.pipeline import RankSeconds, Shape, held, makespan
from meshwright.cost.simulate import StageSeconds, simulate
from meshwright.schedule import NAMED, build
from meshwright.schedule.build import LOOPS, V_SHAPES
from meshwright.schedule.table import Work
from meshwright.spec.plan import ScheduleKind
from tests.cost.pipeline_cases import chunks_of, closed, played, ranks_of, shape_of

GPIPE, ONE_F_ONE_B, INTERLEAVED = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED


@given(
    pipeline=st.integers(1, 8),
    microbatches=st.integers(1, 24),
    kind=st.sampled_from([GPIPE, ONE_F_ONE_B]),
    ratio=st.sampled_from([1.0, 2.0, 3.0]),
    transfer=st.sampled_from([0.0, 0.02, 0.05]),
)
@settings(max_examples=25)
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
@settings(max_examples=20)
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
@settings(max_examples=25)
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
@settings(max_examples=20)
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


# The largest share by which each closed form may fall short of and exceed the simulation, and what share of random
# stages may be told wrong by more than a hundredth.
MISSES = {
    ScheduleKind.GPIPE: (1e-9, 1e-9, 0.0),
    ScheduleKind.ONE_F_ONE_B: (0.01, 1e-9, 0.0),
    ScheduleKind.SEQUENCE_1F1B: (0.01, 1e-9, 0.0),
    ScheduleKind.BREADTH_FIRST: (1e-9, 1e-9, 0.0),
    ScheduleKind.ZERO_BUBBLE_H1: (0.01, 1e-9, 0.0),
    ScheduleKind.ZERO_BUBBLE_H2: (0.01, 0.01, 0.0),
    ScheduleKind.ZERO_BUBBLE_V: (0.02, 1e-9, 0.05),
    ScheduleKind.DUAL_PIPE_V: (0.025, 1e-9, 0.02),
    ScheduleKind.INTERLEAVED: (0.05, 1e-9, 0.2),
}


def random_case(kind, rng, *, rounds):
    pipeline, chunks = int(rng.integers(2, 9)), chunks_of(kind)
    forward = 1.0 + 0.3 * rng.uniform(-1.0, 1.0, pipeline * chunks)
    return {
        "pipeline": pipeline,
        "chunks": chunks,
        "microbatches": pipeline * int(rng.integers(*rounds)),
        "slices": int(rng.integers(1, 5)) if kind is ScheduleKind.SEQUENCE_1F1B else 1,
        "forward": forward.tolist(),
        "backward": (rng.choice([1.5, 2.0, 3.0]) * forward).tolist(),
        "transfer": rng.choice([0.0, 0.02, 0.1]),
        "weight_share": rng.choice([0.4, 0.5, 0.6]),
    }


def missed(kind, cases):
    """Closed form over simulation, less one."""
    return np.array([closed(kind, **case) / played(kind, **case) - 1.0 for case in cases])


@pytest.mark.parametrize("kind", list(MISSES))
def test_closed_forms_of_random_stages(kind):
    rng, (short, long, misses) = np.random.default_rng(7), MISSES[kind]
    errors = missed(kind, [random_case(kind, rng, rounds=(2, 7)) for _ in range(60)])
    assert -short <= errors.min()
    assert errors.max() <= long
    assert np.mean(np.abs(errors) > 0.01) <= misses


# The same of stages one of which may be twice as long as another, with an embedding and a head, of few microbatches.
FEW = {
    ScheduleKind.GPIPE: (1e-9, 1e-9, 0.0),
    ScheduleKind.ONE_F_ONE_B: (0.01, 1e-9, 0.0),
    ScheduleKind.SEQUENCE_1F1B: (0.015, 1e-9, 0.02),
    ScheduleKind.BREADTH_FIRST: (1e-9, 1e-9, 0.0),
    ScheduleKind.ZERO_BUBBLE_H1: (0.03, 0.005, 0.05),
    ScheduleKind.ZERO_BUBBLE_H2: (0.06, 0.01, 0.1),
    ScheduleKind.ZERO_BUBBLE_V: (0.06, 1e-9, 0.1),
    ScheduleKind.DUAL_PIPE_V: (0.06, 1e-9, 0.1),
    ScheduleKind.INTERLEAVED: (0.125, 1e-9, 0.5),
}


@pytest.mark.parametrize("kind", list(FEW))
def test_closed_forms_of_few_microbatches_and_stages_of_unlike_layers(kind):
    """One microbatch a rank in loops, two in V shapes, one to three of others, whole rounds or not."""
    rng, (short, long, misses) = np.random.default_rng(11), FEW[kind]
    cases = []
    for _ in range(60):
        case = random_case(kind, rng, rounds=(1, 2) if kind in LOOPS else (2, 4))
        forward = rng.choice([1.0, 2.0], len(case["forward"]))
        forward[0] += 0.2 * rng.uniform()
        forward[-1] += 1.5 * rng.uniform()
        few = {} if kind in LOOPS | V_SHAPES else {"microbatches": int(rng.integers(1, 3 * case["pipeline"]))}
        cases.append(case | few | {"forward": forward.tolist(), "backward": (2.0 * forward).tolist()})
    errors = missed(kind, cases)
    assert -short <= errors.min()
    assert errors.max() <= long
    assert np.mean(np.abs(errors) > 0.01) <= misses


# The same where one link takes ten times as long as a stage's forward.
OVER_A_SLOW_LINK = {
    ScheduleKind.GPIPE: (1e-9, 1e-9),
    ScheduleKind.ONE_F_ONE_B: (0.03, 1e-9),
    ScheduleKind.SEQUENCE_1F1B: (0.02, 1e-9),
    ScheduleKind.BREADTH_FIRST: (1e-9, 1e-9),
    ScheduleKind.ZERO_BUBBLE_H1: (0.04, 1e-9),
    ScheduleKind.ZERO_BUBBLE_H2: (0.12, 1e-9),
    ScheduleKind.ZERO_BUBBLE_V: (0.24, 1e-9),
    ScheduleKind.DUAL_PIPE_V: (0.27, 1e-9),
    ScheduleKind.INTERLEAVED: (0.17, 0.006),
}


@pytest.mark.parametrize("kind", list(OVER_A_SLOW_LINK))
def test_closed_forms_over_a_slow_link(kind):
    rng, (short, long) = np.random.default_rng(13), OVER_A_SLOW_LINK[kind]
    cases = []
    for _ in range(60):
        case = random_case(kind, rng, rounds=(2, 7))
        forward = 1.0 + 0.1 * rng.uniform(-1.0, 1.0, len(case["forward"]))
        forward[0] += 0.1 * rng.uniform()
        forward[-1] += 0.8 * rng.uniform()
        between = np.full(case["pipeline"] - 1, 0.02)
        between[rng.integers(0, len(between))] = 10.0
        seconds = {"forward": forward.tolist(), "backward": (2.0 * forward).tolist(), "transfer": between.tolist()}
        cases.append(case | seconds)
    errors = missed(kind, cases)
    assert -short <= errors.min()
    assert errors.max() <= long


@pytest.mark.parametrize("kind", list(MISSES))
@given(
    pipeline=st.integers(2, 8),
    rounds=st.integers(2, 5),
    embedding=st.floats(0.0, 0.1),
    head=st.floats(0.0, 0.8),
    transfer=st.sampled_from([0.0, 0.02]),
)
@settings(max_examples=12)
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
    assert closed(kind, **case) == pytest.approx(played(kind, **case), rel=0.01)


def test_rows_of_unlike_schedules_are_priced_as_each_alone():
    kinds, sizes, shown = list(MISSES), {"pipeline": 4, "chunks": 2, "microbatches": 12}, np.arange(4)
    singles = [ranks_of(kind, np.arange(1.0, 9.0), pipeline=4, chunks=2, shown=shown) for kind in kinds]
    shapes = [shape_of(kind, shown=shown, **sizes) for kind in kinds]

    def joined(parts, of):
        return of(
            **{
                each.name: np.concatenate([getattr(part, each.name) for part in parts])
                for each in fields(of)
                if each.name != "tables"
            }
        )

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
    kind=st.sampled_from(NAMED),
    pipeline=st.integers(1, 8),
    chunks=st.integers(1, 4),
    microbatches=st.integers(1, 30),
    slices=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150)
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
