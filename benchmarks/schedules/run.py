"""Schedules as data: seconds to make and time a large one, how far closed forms and synthesis are from the truth."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from tests.schedule.exact import Exact

import record
from meshwright.cost.pipeline import RankSeconds, Shape, makespan
from meshwright.cost.simulate import StageSeconds, play
from meshwright.cost.table import SCHEDULES
from meshwright.schedule import graph, placement, program
from meshwright.schedule.build import LOOPS, V_SHAPES
from meshwright.schedule.synthesize import synthesize
from meshwright.schedule.workload import Workload
from meshwright.spec.plan import ScheduleKind

RUNS = 7
DRAWS = 200
CASES = 40


def rounded(values: list[float]) -> list[float]:
    return [round(value, 5) for value in values]


def median_seconds(work: Callable[[], object]) -> tuple[float, list[float]]:
    work()
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), seconds


def large() -> tuple[list[record.Row], dict[str, Any]]:
    """64 ranks, 512 microbatches, 3 chunks, interleaved."""
    sizes = {"pipeline": 64, "chunks": 3, "microbatches": 512}
    stages = [StageSeconds(forward=1.0 + 0.01 * (s % 7), backward=2.0, transfer=0.02) for s in range(192)]
    made = program(ScheduleKind.INTERLEAVED, **sizes)
    waves = graph(made)
    simulated, runs = median_seconds(lambda: play(waves, stages=stages))
    built, builds = median_seconds(lambda: graph(program(ScheduleKind.INTERLEAVED, **sizes)))
    name = f"64 ranks x 512 microbatches x 3 chunks, {len(made):,} actions"
    rows = [
        record.Row(
            name=f"simulate {name} (median of {RUNS})",
            target="< 50 ms",
            measured=f"{simulated * 1e3:.0f} ms",
            holds=simulated < 0.05,
        ),
        record.Row(
            name=f"build them and their graph (median of {RUNS})",
            target="< 300 ms",
            measured=f"{built * 1e3:.0f} ms",
            holds=built < 0.3,
        ),
    ]
    return rows, {"simulate_seconds": rounded(runs), "build_seconds": rounded(builds)}


def ranks_of(kind: ScheduleKind, values: np.ndarray, *, pipeline: int, chunks: int) -> RankSeconds:
    places = np.array(placement(kind, pipeline=pipeline, chunks=chunks))
    first, last = values[:pipeline], values[-pipeline:][np.argsort(places[-pipeline:])]
    return RankSeconds(
        total=np.bincount(places, weights=values)[None],
        first=first[None],
        last=last[None],
        first_upto=np.cumsum(first)[None],
        last_upto=np.cumsum(last)[None],
        everything=np.array([values.sum()]),
    )


def error(kind: ScheduleKind, generator: np.random.Generator, *, spread: float, head: float) -> float:
    """Closed form over simulation, less one, of stages that differ by `spread` and a head of so much of a stage."""
    pipeline, chunks = int(generator.integers(2, 17)), 2 if kind in LOOPS | V_SHAPES else 1
    microbatches = pipeline * int(generator.integers(2, 9))
    forward = 1.0 + spread * generator.uniform(-1.0, 1.0, pipeline * chunks)
    forward[-1] += head * generator.uniform()
    places = placement(kind, pipeline=pipeline, chunks=chunks)
    way = float(generator.choice([0.0, 0.02, 0.1]))
    stages = [
        StageSeconds(forward=seconds, backward=2.0 * seconds, transfer=way * (rank != after))
        for seconds, rank, after in zip(forward, places, [*places[1:], places[-1]], strict=True)
    ]
    made = program(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches)
    played = play(graph(made), stages=stages).makespan
    shape = Shape(
        schedule=np.array([SCHEDULES.index(kind)]),
        pipeline=np.array([float(pipeline)]),
        chunks=np.array([float(chunks)]),
        microbatches=np.array([float(microbatches)]),
        rank=np.arange(pipeline)[None],
        valid=np.ones((1, pipeline), dtype=np.bool_),
    )
    ranks = ranks_of(kind, forward, pipeline=pipeline, chunks=chunks)
    reach = way * np.arange(float(pipeline))[None]
    closed = makespan(shape, forward=ranks, backward=ranks.times(2.0), reach=reach)
    return float(closed[0]) / played - 1.0


def closed_forms() -> tuple[list[record.Row], dict[str, Any]]:
    """Equal layers and a head; stages up to 30 % apart are only told, as predictions of one plan follow its path."""
    rows, raw = [], {}
    for kind in SCHEDULES:
        generator = np.random.default_rng(0)
        layers = [error(kind, generator, spread=0.0, head=0.8) for _ in range(DRAWS)]
        uneven = [error(kind, generator, spread=0.3, head=0.0) for _ in range(DRAWS)]
        raw[kind.value] = {"layers_and_head": rounded(layers), "uneven": rounded(uneven)}
        worst, mean, lost = (np.abs(layers).max(), np.abs(uneven).mean(), np.abs(uneven).max())
        rows.append(
            record.Row(
                name=f"closed form of {kind.value}, layers and a head (stages 30 % apart: mean, worst)",
                target="<= 1 %",
                measured=f"{worst:.2%} ({mean:.2%}, {lost:.1%})",
                holds=bool(worst <= 0.01),
            )
        )
    return rows, raw


def small(generator: random.Random) -> Workload:
    pipeline, chunks, kind, microbatches, limit = generator.choice(
        [
            (2, 1, ScheduleKind.ONE_F_ONE_B, 5, 2.0),
            (3, 1, ScheduleKind.ONE_F_ONE_B, 4, 3.0),
            (3, 1, ScheduleKind.ONE_F_ONE_B, 4, 2.0),
            (2, 2, ScheduleKind.ZERO_BUBBLE_V, 3, 2.0),
            (2, 2, ScheduleKind.ZERO_BUBBLE_V, 3, 1.5),
            (2, 2, ScheduleKind.INTERLEAVED, 3, 1.5),
        ]
    )
    stages = pipeline * chunks

    def draw() -> tuple[float, ...]:
        return tuple(generator.uniform(0.6, 1.4) for _ in range(stages))

    return Workload(
        forward=draw(),
        input=draw(),
        weight=draw(),
        transfer=(0.3,) * stages,
        placement=placement(kind, pipeline=pipeline, chunks=chunks),
        microbatches=microbatches,
        activation_bytes=(1.0 / chunks,) * stages,
        limit_bytes=(limit,) * pipeline,
    )


def synthesis() -> tuple[list[record.Row], dict[str, Any]]:
    """Random small workloads with tight memory against branch and bound."""
    generator, gaps, gains, seconds = random.Random(0), [], [], []
    for _ in range(CASES):
        work = small(generator)
        start = time.perf_counter()
        made = synthesize(work, tries=1000)
        seconds.append(time.perf_counter() - start)
        shortest = Exact(work).shortest(below=made.seconds - 1e-9) or made.seconds
        gaps.append(made.seconds / shortest - 1.0)
        if made.classic_kind is not None:
            gains.append(made.classic / made.seconds - 1.0)
    rows = [
        record.Row(
            name=f"synthesis over the shortest schedule, worst of {CASES} (mean)",
            target="<= 10 %",
            measured=f"{max(gaps):.1%} ({statistics.mean(gaps):.2%})",
            holds=max(gaps) <= 0.1,
        ),
        record.Row(
            name=f"best classic schedule over synthesis, least of the {len(gains)} where one fits (mean)",
            target=">= 0 %",
            measured=f"{min(gains):.1%} ({statistics.mean(gains):.1%})",
            holds=min(gains) >= -1e-9,
        ),
    ]
    return rows, {"over_shortest": rounded(gaps), "classic_over": rounded(gains), "seconds": rounded(seconds)}


def main() -> None:
    rows: list[record.Row] = []
    raw: dict[str, Any] = {}
    for name, part in (("large", large), ("closed_forms", closed_forms), ("synthesis", synthesis)):
        found, numbers = part()
        rows += found
        raw[name] = numbers
    record.finish("schedules", rows, raw)


if __name__ == "__main__":
    main()
