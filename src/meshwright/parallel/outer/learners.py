"""Learners: the replica of a plan that this rank trains in, and the ranks that hold the same part in the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from meshwright.parallel.mesh import Mesh, build_mesh, build_mesh_over
from meshwright.spec.plan import Plan

ACROSS, MEETING = "learners", "meeting of learners"  # how torch knows the groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Learners:
    """Learner `index` of `count`, whose ranks are `mesh`, of the plan of one learner.

    `across` are the ranks that hold in every learner what this one holds, in their order: what was learnt crosses it,
    one collective at a time. `meeting` are the same ranks in a group of its own, for a few numbers that do not wait for
    that. Both are None where there is one learner.
    """

    index: int
    count: int
    mesh: Mesh
    across: dist.ProcessGroup | None = None
    meeting: dist.ProcessGroup | None = None


def build_learners(plan: Plan, *, device_type: str) -> Learners:
    """The learners of `plan` over the processes of the default group. Collective; raises as `build_mesh` does."""
    if plan.learners == 1:
        return Learners(index=0, count=1, mesh=build_mesh(plan, device_type=device_type))
    members = [plan.ranks_of_learner(learner) for learner in range(plan.learners)]
    own = plan.of_learner()
    meshes = [build_mesh_over(own, device_type=device_type, processes=ranks) for ranks in members]
    index, mesh = next((index, mesh) for index, mesh in enumerate(meshes) if mesh is not None)
    places = list(zip(*members, strict=True))
    across, meeting = (
        [dist.new_group(list(ranks), group_desc=described) for ranks in places] for described in (ACROSS, MEETING)
    )
    return Learners(index=index, count=plan.learners, mesh=mesh, across=across[mesh.rank], meeting=meeting[mesh.rank])
