"""Learners: the replica of a plan that this rank trains in, and the ranks that hold the same part in the others."""

from __future__ import annotations

from collections.abc import Collection
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
    that. Both are None where all ranks meet in every step, and of one rank where others have left a learner alone.
    `everyone` are all ranks of all learners; None where there is one.
    """

    index: int
    count: int
    mesh: Mesh
    across: dist.ProcessGroup | None = None
    meeting: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """That of this process among everyone."""
        return 0 if self.everyone is None else dist.get_rank(self.everyone)


def build_learners(plan: Plan, *, device_type: str, kv_heads: Collection[int] = ()) -> Learners:
    """The learners of `plan` over the processes of the default group. Collective; takes and raises what `build_mesh`
    does."""
    if not plan.gradients.kind.has_learners:
        mesh = build_mesh(plan, device_type=device_type, kv_heads=kv_heads)
        return Learners(index=0, count=1, mesh=mesh, everyone=mesh.everyone)
    members = [plan.ranks_of_learner(learner) for learner in range(plan.learners)]
    own = plan.of_learner()
    meshes = [build_mesh_over(own, device_type=device_type, processes=ranks, kv_heads=kv_heads) for ranks in members]
    index, mesh = next((index, found) for index, found in enumerate(meshes) if found is not None)
    places = list(zip(*members, strict=True))
    across, meeting = (
        [dist.new_group(list(ranks), group_desc=described) for ranks in places] for described in (ACROSS, MEETING)
    )
    return Learners(
        index=index,
        count=plan.learners,
        mesh=mesh,
        across=across[mesh.rank],
        meeting=meeting[mesh.rank],
        everyone=dist.group.WORLD,
    )
