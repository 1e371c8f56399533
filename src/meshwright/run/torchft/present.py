"""Present: whether torchft is there, which is asked before anything starts."""

from __future__ import annotations

import importlib.util

from meshwright.spec.errors import EnvironmentUnfit, Problem
from meshwright.spec.job import JobSpec


def check(job: JobSpec) -> None:
    """Raises EnvironmentUnfit for a job that torchft is to keep where it is not installed."""
    if not job.elastic.by_torchft or importlib.util.find_spec("torchft") is not None:
        return
    raise EnvironmentUnfit(
        Problem(
            what="torchft is not installed",
            where="job.elastic.backend",
            why="replicas under torchft find each other by its lighthouse and vote by its managers",
            fix='pip install "meshwright[torchft]", or choose elastic.backend = "own", which needs nothing',
        )
    )
