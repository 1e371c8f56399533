"""What a peer cannot say is refused by name, every reason at once."""

from __future__ import annotations

from meshwright.export.meaning import oddities
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import ExitCode, MeshwrightError, Problem
from meshwright.spec.plan import Design


class NotExpressible(MeshwrightError):
    """The peer has no words for part of the plan; the problems name every part."""

    exit_code = ExitCode.NO_PLAN


class NotTheSame(MeshwrightError):
    """Flags that this system wrote were read back as another plan: a fault of the writer or of the reader."""

    exit_code = ExitCode.BUG


class Refusals:
    """Collects the parts of a plan that `peer` cannot say."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.problems: list[Problem] = []

    def when(self, broken: bool, where: str, what: str, *, why: str = "", fix: str = "") -> None:
        """Add a problem when `broken`."""
        if broken:
            self.problems.append(Problem(where=where, what=f"{self.peer} cannot say {what}", why=why, fix=fix))

    def end(self) -> None:
        """Raises NotExpressible with everything found."""
        if self.problems:
            raise NotExpressible(self.problems)


def refuse_everywhere(design: Design, refusals: Refusals) -> None:
    """What none of the peers can say: uneven machines, ranks moved from device to device, processors."""
    plan, groups = design.plan, design.cluster.groups
    refusals.when(plan.is_placed, "plan.placement", "which rank lies on which device", fix="plan without placement")
    turned = not plan.has_usual_order
    refusals.when(turned, "plan.axes", "axes in this order", fix="plan with --set constraints.order=usual")
    shapes = {(group.devices_per_node, group.device.name) for group in groups}
    refusals.when(len(shapes) > 1, "cluster.groups", "nodes that differ", fix="plan on the nodes of one group")
    whole = plan.world_size <= groups[0].devices_per_node or plan.world_size % groups[0].devices_per_node == 0
    what = f"{plan.world_size} ranks on nodes of {groups[0].devices_per_node} devices"
    refusals.when(not whole, "plan.axes", what, fix="use whole nodes")
    cpu = any(group.device.kind is DeviceKind.CPU for group in groups)
    refusals.when(cpu, "cluster.groups", "training on processors", why="its recipes need accelerators")
    tensors = {group.tensor for stage in plan.stages for group in stage.groups}
    refusals.when(len(tensors) > 1, "plan.stages", "tensor degrees that differ between blocks")
    several = plan.gradients.kind != "every_step"
    refusals.when(several, "plan.gradients.kind", f"gradients that meet {plan.gradients.kind}", fix="choose every_step")


def refuse_odd_model(design: Design, refusals: Refusals) -> None:
    """What of the model the flags that are written here do not build."""
    for words in oddities(design.model):
        refusals.when(True, "model", words, why=f"the model is {design.model.name}")
