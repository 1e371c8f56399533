"""What a peer cannot say is refused by name, every reason at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from meshwright.export.columns import Columns
from meshwright.export.oddities import oddities
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import ExitCode, MeshwrightError, Problem
from meshwright.spec.exchange import TokenLayout
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Mixture
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Design, Dispatch, TensorGrid, Training
from meshwright.spec.routing import Choice

_WHOLE = "plan with --set skip.share=0"
Mask = npt.NDArray[np.bool_]


class NotExpressible(MeshwrightError):
    """The peer has no words for part of the plan; the problems name every part."""

    exit_code = ExitCode.NO_PLAN


class NotTheSame(MeshwrightError):
    """Flags that this system wrote were read back as another plan: a fault of the writer or of the reader."""

    exit_code = ExitCode.BUG


class Refusals:
    """Collects the parts of plans that `peer` cannot say: as problems of the first plan, and as masks of them all."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.problems: list[Problem] = []
        self.masks: dict[str, Mask] = {}

    def when(self, broken: Mask | np.bool_ | bool, where: str, what: str, *, why: str = "", fix: str = "") -> None:
        """Add what is refused where plans are `broken`, a mask of them or an answer for all; `what` is in the words
        of the first."""
        mask = np.atleast_1d(np.asarray(broken, dtype=np.bool_))
        if not mask.any():
            return
        self.masks[where] = self.masks.get(where, np.zeros(1, dtype=np.bool_)) | mask
        self.problems.append(Problem(where=where, what=f"{self.peer} cannot say {what}", why=why, fix=fix))


def refuse_all(design: Design, refuse: Callable[[Columns], Refusals], *, peer: str) -> None:
    """Raises NotExpressible with everything of `design` that `peer`, whose rules are `refuse`, cannot say."""
    plan = design.plan
    groups = plan.groups
    settings = {(each.tensor, each.sequence_parallel, each.sharding, each.shards, each.precision) for each in groups}
    if len(settings) > 1:
        found, what = Refusals(peer), "tensor degrees, sharding or precision that differ between blocks"
        found.when(True, "plan.stages", what, fix="give every block the same")
    else:
        found = refuse(Columns.of_design(design))
    usual = "plan with --set constraints.order=usual"
    found.when(plan.is_placed, "plan.placement", "which rank lies on which device", fix=usual)
    found.when(not plan.has_usual_order, "plan.axes", "axes in this order", fix=usual)
    gathered = plan.experts is not None and plan.experts.dispatch is not Dispatch.ALL_TO_ALL
    found.when(gathered, "plan.experts.dispatch", "tokens gathered by experts", fix="choose all_to_all")
    empty = plan.empty_rows > 0
    found.when(empty, "plan.empty_rows", "rows without a sequence", fix="choose data ranks that divide the batch")
    grid = plan.tensor_grid
    found.when(grid is not TensorGrid.LINE, "plan.tensor_grid", f"a {grid.value} of tensor ranks", fix="choose line")
    kind = plan.gradients.kind
    found.when(kind.has_learners, "plan.gradients.kind", f"learners that meet as {kind.value}", fix="choose every_step")
    compressed = plan.gradients.compression
    what = "" if compressed is None else f"gradients that meet by {compressed.words}"
    found.when(compressed is not None, "plan.gradients.compression", what, fix="leave it out")
    frozen = any(group.training is not Training.ALL for group in groups)
    found.when(frozen, "plan.stages[*].groups[*].training", "blocks that are not trained", fix="train all")
    found.when(bool(plan.schedule.paths), "plan.schedule.paths", "microbatches that leave out stages", fix=_WHOLE)
    fewer = any(group.shards not in (None, plan.shard) for group in groups)
    what = "states shared by fewer ranks than the axis has"
    found.when(fewer, "plan.stages[*].groups[*].shards", what, fix="leave shards out")
    if found.problems:
        raise NotExpressible(found.problems)


def refuse_layout(said: Columns, refusals: Refusals, *known: TokenLayout) -> None:
    """Context ranks that hold other tokens than those of the `known` layouts."""
    odd = (said.table.context > 1) & ~said.among("token_layout", *known)
    what = f"{said.word('token_layout')} tokens of context ranks"
    refusals.when(odd, "plan.exchange.layout", what, fix=f"choose {known[0].value}")


def refuse_everywhere(said: Columns, refusals: Refusals) -> None:
    """What none of the peers can say: uneven machines, nodes in part, processors, routing of the model's own and prefix
    masks."""
    routed = [layer.transform.routing for layer in said.model.layers if isinstance(layer.transform, Mixture)]
    odd = any(routing.choice is not Choice.TOP_K or routing.capacity is not None for routing in routed)
    fix = "choose top_k, without a capacity"
    refusals.when(odd, "model.layers[*].transform.routing", "a routing of its own", fix=fix)
    prefix, causal = said.model.prefix > 0.0, "choose prefix = 0 in the model, which is causal"
    refusals.when(prefix, "model.layers[*].mixer.prefix", "prefix masks", fix=causal)
    groups = said.cluster.groups
    shapes = {(group.devices_per_node, group.device.name) for group in groups}
    refusals.when(len(shapes) > 1, "cluster.groups", "nodes that differ", fix="plan on the nodes of one group")
    world, per_node = said.table.world, groups[0].devices_per_node
    what = f"{int(world[0])} ranks on nodes of {per_node} devices"
    refusals.when((world > per_node) & (world % per_node != 0), "plan.axes", what, fix="use whole nodes")
    refuse_optimizer(said.job, refusals)
    _refuse_changes(said, refusals)
    kinds = {group.device.kind for group in groups}
    cpu, tpu = DeviceKind.CPU in kinds, DeviceKind.TPU in kinds
    refusals.when(cpu, "cluster.groups", "training on processors", why="its recipes need accelerators")
    refusals.when(tpu, "cluster.groups", "training on TPUs", why="its processes meet over NCCL")


def _refuse_changes(said: Columns, refusals: Refusals) -> None:
    """What of a job makes another model of the model while it is trained."""
    job = said.job
    thin = job.factoring is not None
    refusals.when(thin, "job.low_rank", "factors that take the place of matrices", fix='choose low_rank.kind = "none"')
    what = f"the techniques {', '.join(job.techniques)}"
    refusals.when(bool(job.techniques), "job.techniques", what, fix="leave them out")
    skips = (job.skip.share > 0.0) & (said.table.pipeline > 1)
    refusals.when(skips, "job.skip", "microbatches that leave out stages", fix=_WHOLE)


def refuse_odd_model(said: Columns, refusals: Refusals) -> None:
    """What of the model the flags that are written here do not build."""
    for words in oddities(said.model):
        refusals.when(True, "model", words, why=f"the model is {said.model.name}")


def refuse_uneven_vocabulary(said: Columns, refusals: Refusals) -> None:
    """A vocabulary that a peer fills up with rows where tensor ranks do not divide it."""
    vocab = said.model.vocab
    refusals.when(
        vocab % said.table.tensor != 0,
        "plan.stages[*].groups[*].tensor",
        f"a vocabulary of {vocab:,} of whose rows tensor ranks have unequally many",
        why="it adds rows until they divide it",
        fix="choose a tensor degree that divides it, or give the model a larger vocabulary",
    )


def refuse_copied_heads(said: Columns, refusals: Refusals, *, why: str) -> None:
    """Key-value heads of which there are fewer than tensor ranks, and `why` a peer lays them otherwise or not."""
    least = min(said.model.kv_heads, default=None)
    if least is None:
        return
    refusals.when(
        said.table.tensor > least,
        "plan.stages[*].groups[*].tensor",
        f"copies of {least} key-value heads on more tensor ranks",
        why=why,
        fix=f"choose a tensor degree up to {least}",
    )


def refuse_optimizer(job: JobSpec, refusals: Refusals) -> None:
    """Every optimizer but AdamW in full precision whose groups are the usual ones."""
    spec = job.optimizer
    plain = isinstance(spec, OptimizerSpec) and not spec.groups
    what = "groups of parameters by name" if spec.groups else f"the optimizer {spec.kind} as it is here"
    refusals.when(not plain, "job.optimizer", what, fix="choose adamw without groups")
    narrow = isinstance(spec, OptimizerSpec) and spec.is_narrow
    what = "moments or parameters that take less than fp32"
    refusals.when(narrow, "job.optimizer", what, fix='choose state = "fp32" and master = "fp32"')
