"""A peer as the search asks it: which plans of a table it has no words for, and how it divides a model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.export.columns import Columns
from meshwright.export.peer import Peer, peer_named
from meshwright.export.peers import precisions, refusals, refuse, stages
from meshwright.export.priced import stack_of
from meshwright.export.refuse import NotExpressible
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import Problem
from meshwright.spec.job import Automatic, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What a search for `peer` is held to: the rules by which an export is refused."""

    peer: Peer

    @property
    def name(self) -> str:
        return self.peer.value

    def stack(self, job: JobSpec) -> str:
        """The software that the exported file starts."""
        return stack_of(self.peer, job)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        return precisions(self.peer)

    def trained(self, job: JobSpec) -> JobSpec:
        """The job as the peer trains it: no file that is written here masks documents, and what runs is its own
        software unless the job names another."""
        stack = self.stack(job) if job.software == Automatic.AUTO else job.software
        return replace(job, software=stack, data=replace(job.data, document_mask=False))

    def refused(self, table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> Mapping[str, Mask]:
        """Rows that the peer cannot say, shape (rows,), by the field of the plan that it is for."""
        said = Columns.of(table, model=model, cluster=cluster, job=job)
        return {where: np.broadcast_to(mask, len(table)) for where, mask in refusals(said, to=self.peer).masks.items()}

    def problems(self, design: Design) -> tuple[Problem, ...]:
        """Everything of `design` that the peer cannot say."""
        try:
            refuse(design, to=self.peer)
        except NotExpressible as error:
            return error.problems
        return ()

    def stages(self, model: ModelSpec, pipeline: int) -> tuple[int, ...] | None:
        """The first block of every stage where the peer deals layers itself."""
        return stages(model, pipeline, to=self.peer)


def holder(name: str, *, where: str = "--to") -> Holder:
    """The holder for the peer called `name`. Raises ConfigError, as of `where`, for one that is not known."""
    return Holder(peer=peer_named(name, where=where))
