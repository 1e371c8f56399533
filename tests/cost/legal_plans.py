"""Legal plans of a few models on a few clusters, sampled evenly from the space that the search explores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from meshwright import catalog
from meshwright.cost import SCHEDULES, PlanTable
from meshwright.search import Space, enumerate_plans
from meshwright.search.stages import balanced_stages
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.model import Mixture, ModelSpec, Norm
from meshwright.spec.plan import Design, ScheduleKind
from tests.cost.cost_examples import gpt, llama

WHOLE_BACKWARD = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)


@dataclass(frozen=True)
class Case:
    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec

    def design(self, table: PlanTable, row: int) -> Design:
        length = self.job.sequence_length
        plan = table.to_plan(row, model=self.model.name, cluster=self.cluster.name, sequence_length=length)
        return Design(model=self.model, cluster=self.cluster, job=self.job, plan=plan)


def _job(*, sequences: int, length: int = 2048, masked: bool = False) -> JobSpec:
    tokens = sequences * length
    return JobSpec(
        sequence_length=length, batch_tokens=tokens, total_tokens=100 * tokens, data=DataSpec(document_mask=masked)
    )


def _mixture() -> ModelSpec:
    dense = llama(width=2048, hidden=8192, heads=16, layers=8, vocab=32000)
    experts = Mixture(width=2048, hidden=2048, experts=8, top_k=2, norm=Norm(width=2048))
    layers = tuple(replace(layer, transform=experts) for layer in dense.layers)
    return replace(dense, name="mixture", layers=layers)


@lru_cache(maxsize=8)
def case(name: str) -> Case:
    seven = llama(width=4096, hidden=11008, heads=32, layers=16, vocab=32000)
    two, eight = catalog.load_cluster("2x8xA100-80GB"), catalog.load_cluster("8x8xA100-80GB")
    return {
        "llama": lambda: Case(seven, two, _job(sequences=64)),
        "llama, masked": lambda: Case(seven, eight, _job(sequences=128, masked=True)),
        "gpt": lambda: Case(
            gpt(width=2048, heads=16, layers=12, vocab=51200), catalog.load_cluster("16xH100"), _job(sequences=64)
        ),
        "mixture": lambda: Case(_mixture(), two, _job(sequences=64)),
    }[name]()


CASES = ("llama", "llama, masked", "gpt", "mixture")


@lru_cache(maxsize=8)
def space(name: str) -> Space:
    at = case(name)
    boundaries = balanced_stages(at.model, at.cluster, at.job, precision=Precision.BF16)
    return enumerate_plans(at.model, at.cluster, at.job, boundaries=boundaries)


def sample(
    name: str, *, count: int, seed: int, frames: int = 80, schedules: tuple[ScheduleKind, ...] = WHOLE_BACKWARD
) -> PlanTable:
    """`count` rows of the space of `name` on any of `schedules`, from up to `frames` frames drawn evenly."""
    rng = np.random.default_rng(seed)
    every = space(name)
    chosen = rng.choice(len(every.keys), min(frames, len(every.keys)), replace=False)
    table = every.rows_of(np.sort(chosen))
    known = np.flatnonzero(np.isin(table.schedule, [SCHEDULES.index(kind) for kind in schedules]))
    return table.take(np.sort(rng.choice(known, count, replace=False)))
