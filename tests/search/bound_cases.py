"""What holds of the bounds of every plan of a space: those of bytes, and those of seconds that no plan is to exceed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.search.floors import Floors
from meshwright.search.prices import Prices
from meshwright.search.space import Space
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec, Objective
from meshwright.spec.model import ModelSpec

SLACK = 1.0 + 1e-9


def hold_bytes(space: Space, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec, prices: Prices) -> None:
    """No plan that fits holds less than the bound of its frame says, and none less than its states do."""
    floors = Floors(space, model=model, cluster=cluster, job=replace(job, objective=Objective.MEMORY))
    every = np.arange(len(space.keys))
    least = floors.frames(every >= 0)[space.frame_of(every)]
    assert np.all(least[prices.fits] <= prices.memory_bytes[prices.fits] * SLACK)
    assert np.all(floors.states(space.table) <= prices.memory_bytes * SLACK)


def hold_times(space: Space, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec, prices: Prices) -> None:
    """No plan that is as fast as the median is left out where that is the slowest."""
    within, every = float(np.median(prices.upper_seconds[prices.finite])), np.arange(len(space.keys))
    quick, frame = prices.finite & (prices.upper_seconds <= within / SLACK), space.frame_of(every)
    for objective in Objective:
        asked = replace(job, objective=objective)
        floors = Floors(space, model=model, cluster=cluster, job=asked, within=within)
        for floor in (floors.shared, floors.scheduled):
            assert np.all(np.isfinite(floor(space.table, frame)[quick]))
        assert not np.any(floors.slow(space.table, frame)[quick])
        assert np.all(np.isfinite(floors.frames(every >= 0)[frame][quick & prices.fits]))
