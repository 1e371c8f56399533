"""Designs, explains and runs distributed training.

    import meshwright

    decision = meshwright.design("llama-3.1-8b", "64xH100")
    print(decision.design.plan.describe())
    report = meshwright.predict(decision.design)

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from meshwright.api import (
        compare,
        design,
        dry_run,
        explain,
        export,
        headroom,
        predict,
        sensitivity,
        sweep,
        train,
        validate,
        why_not,
    )
    from meshwright.parallel.foreign import parallelize
    from meshwright.search import Candidate, Decision
    from meshwright.spec.cluster import ClusterSpec, Precision
    from meshwright.spec.degrees import plan_of_degrees
    from meshwright.spec.errors import MeshwrightError, Problem
    from meshwright.spec.job import Constraints, DataSpec, JobSpec, LearningRate, Objective
    from meshwright.spec.model import ModelSpec
    from meshwright.spec.optimizer import OptimizerSpec
    from meshwright.spec.plan import Design, Plan
    from meshwright.spec.report import Report, diff

__all__ = [
    "Candidate",
    "ClusterSpec",
    "Constraints",
    "DataSpec",
    "Decision",
    "Design",
    "JobSpec",
    "LearningRate",
    "MeshwrightError",
    "ModelSpec",
    "Objective",
    "OptimizerSpec",
    "Plan",
    "Precision",
    "Problem",
    "Report",
    "__version__",
    "compare",
    "design",
    "diff",
    "dry_run",
    "explain",
    "export",
    "headroom",
    "parallelize",
    "plan_of_degrees",
    "predict",
    "sensitivity",
    "sweep",
    "train",
    "validate",
    "why_not",
]

_HOMES = {
    "Candidate": "search",
    "ClusterSpec": "spec.cluster",
    "Constraints": "spec.job",
    "DataSpec": "spec.job",
    "Decision": "search",
    "Design": "spec.plan",
    "JobSpec": "spec.job",
    "LearningRate": "spec.job",
    "MeshwrightError": "spec.errors",
    "ModelSpec": "spec.model",
    "Objective": "spec.job",
    "OptimizerSpec": "spec.optimizer",
    "Plan": "spec.plan",
    "Precision": "spec.cluster",
    "Problem": "spec.errors",
    "Report": "spec.report",
    "compare": "api",
    "design": "api",
    "diff": "spec.report",
    "dry_run": "api",
    "explain": "api",
    "export": "api",
    "headroom": "api",
    "parallelize": "parallel.foreign",
    "plan_of_degrees": "spec.degrees",
    "predict": "api",
    "sensitivity": "api",
    "sweep": "api",
    "train": "api",
    "validate": "api",
    "why_not": "api",
}


class _Front(ModuleType):
    """This package: its functions keep their names when a room of the same name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Front


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
