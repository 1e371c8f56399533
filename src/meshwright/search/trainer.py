"""Another trainer that the search may be held to: plans that it has no words for are left out, each by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.search.product import Rejection
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import Problem
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design

Mask = npt.NDArray[np.bool_]


class Trainer(Protocol):
    """What `meshwright.export` knows of a trainer, handed in as a value: its rules are asked and not written again."""

    @property
    def name(self) -> str: ...

    def stack(self, job: JobSpec) -> str:
        """The software, as a job names it, that it trains `job` with."""
        ...

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Those of products that it has words for."""
        ...

    def trained(self, job: JobSpec) -> JobSpec:
        """The job as it trains it: without what it does not do whatever the plan, and with its own software where the
        job names none."""
        ...

    def refused(self, table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> Mapping[str, Mask]:
        """Rows that it has no words for, shape (rows,), by the field of the plan that it is for."""
        ...

    def problems(self, design: Design) -> tuple[Problem, ...]:
        """Everything of `design` that it has no words for."""
        ...

    def stages(self, model: ModelSpec, pipeline: int) -> Sequence[int] | None:
        """The first block of every stage where it divides the model itself; None where the plan does."""
        ...


class Held:
    """Tables without the plans that `trainer` has no words for, all of them without a trainer; `rejected` counts what
    was left out, of the plans that were weighed."""

    def __init__(self, trainer: Trainer | None, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> None:
        self.trainer = trainer
        self._model, self._cluster, self._job = model, cluster, job
        self._weighed = 0
        self._counts: dict[str, tuple[int, Problem]] = {}

    def allows(self, table: PlanTable) -> Mask:
        """Rows that the trainer has words for; the others are counted under every field that refuses them."""
        allowed = np.ones(len(table), dtype=np.bool_)
        if self.trainer is None or not len(table):
            return allowed
        refused = self.trainer.refused(table, model=self._model, cluster=self._cluster, job=self._job)
        for where, mask in refused.items():
            allowed &= ~mask
            if mask.any():
                before, told = self._counts.get(where) or (0, self._told(table.take(np.flatnonzero(mask)[:1]), where))
                self._counts[where] = before + int(np.count_nonzero(mask)), told
        self._weighed += len(table)
        return allowed

    def _told(self, one: PlanTable, where: str) -> Problem:
        assert self.trainer is not None
        return next(problem for problem in self.trainer.problems(self._design(one)) if problem.where == where)

    def _design(self, one: PlanTable) -> Design:
        length = self._job.sequence_length
        plan = one.to_plan(0, model=self._model.name, cluster=self._cluster.name, sequence_length=length)
        return Design(model=self._model, cluster=self._cluster, job=self._job, plan=plan)

    def whatever_the_plan(self, some: PlanTable) -> tuple[Problem, ...]:
        """What the trainer has no words for in the model, the cluster or the job; asked of one of `some`."""
        if self.trainer is None or not len(some):
            return ()
        problems = self.trainer.problems(self._design(some.take(np.zeros(1, dtype=np.int64))))
        return tuple(problem for problem in problems if problem.where.split(".")[0] in ("model", "cluster", "job"))

    def nothing_left(self) -> tuple[Problem, ...]:
        """Why the trainer has words for no plan that was weighed: what refuses all of them, or what refuses most."""
        name = "" if self.trainer is None else self.trainer.name
        whole = tuple(problem for count, problem in self._counts.values() if count == self._weighed)
        if whole:
            return whole
        why = "; ".join(f"{entry.rule} refused {entry.count:,}, as {entry.example}" for entry in self.rejected[:4])
        what = f"{name} has no words for any of {self._weighed:,} plans"
        return (Problem(where="--for", what=what, why=why, fix="fix and forbid less, or plan without --for"),)

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        name = "" if self.trainer is None else self.trainer.name
        return tuple(
            Rejection(rule=f"{name}: {where}", count=count, example=problem.what)
            for where, (count, problem) in sorted(self._counts.items(), key=lambda entry: -entry[1][0])
        )

    def says(self, design: Design) -> bool:
        """Whether the trainer has words for all of `design`."""
        return self.trainer is None or not self.trainer.problems(design)
