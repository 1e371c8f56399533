"""A legal and an illegal design for every rule on how many microbatches a schedule has."""

from __future__ import annotations

from dataclasses import replace

from meshwright.spec.plan import Schedule, ScheduleKind
from tests.search import search_samples as samples
from tests.search.compression_cases import Case
from tests.search.rule_designs import INTERLEAVED, D, reranked

PAIRED = Schedule(kind=ScheduleKind.DUAL_PIPE_V, microbatches=2, chunks=2)
SCHEDULE_CASES = {
    "microbatches-fill": Case(
        lambda: D(microbatch=16, schedule=Schedule(kind=ScheduleKind.GPIPE, microbatches=1)),
        lambda: D(microbatch=16, schedule=Schedule(microbatches=1)),
        "1 microbatch does not fill a pipeline of 2 under 1f1b",
    ),
    "microbatches-pair": Case(
        lambda: reranked(D(schedule=replace(PAIRED, microbatches=8)), 0, 1, 1, 0),
        lambda: reranked(D(schedule=PAIRED, microbatch=8), 0, 1, 1, 0),
        "2 microbatches are not two for each of 2 ranks under dualpipe-v",
    ),
    "microbatches-round": Case(
        lambda: D(schedule=INTERLEAVED),
        lambda: D(microbatch=1, schedule=replace(INTERLEAVED, microbatches=5), asked=samples.job(sequences=10)),
        "5 microbatches are not whole rounds of pipeline 2",
    ),
    "schedule-has-one-name": Case(
        lambda: D(microbatch=8, schedule=Schedule(kind=ScheduleKind.GPIPE, microbatches=2)),
        lambda: D(microbatch=8, schedule=Schedule(kind=ScheduleKind.ZERO_BUBBLE_H2, microbatches=2)),
        "2 microbatches under zb-h2 on 2 pipeline ranks is zb-h1 by another name",
    ),
}
