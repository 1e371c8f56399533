"""Rules of elastic runs: what a run that goes on without a lost rank cannot be asked for yet."""

from __future__ import annotations

from meshwright.search.rules import Rule, Scope
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import Problem
from meshwright.spec.job import Switch
from meshwright.spec.plan import Design

_OFF = "leave job.elastic.min_ranks at 0"


def fewest_ranks(design: Design) -> Problem | None:
    """Some rank may be lost: there are several, and more than have to be left."""
    fewest, ranks = design.job.elastic.min_ranks, design.plan.world_size
    if fewest < ranks or not design.job.elastic.on:
        return None
    what = f"a run of {ranks} rank{'' if ranks == 1 else 's'} that needs {fewest} of them can lose none"
    fix = f"choose 1 to {ranks - 1}" if ranks > 1 else "design the plan for more devices, or choose 0"
    return Problem(where="job.elastic.min_ranks", what=what, fix=fix)


def on_processors(design: Design) -> Problem | None:
    """Ranks meet over gloo, which a process can leave and form again."""
    kinds = {group.device.kind for group in design.cluster.groups}
    if not design.job.elastic.on or kinds == {DeviceKind.CPU}:
        return None
    what = "elastic runs on accelerators can be predicted and not trained yet"
    why = "nobody has seen groups of NCCL left and formed again here"
    return Problem(where="job.elastic.min_ranks", what=what, why=why, fix=_OFF)


def of_whole_learners(design: Design) -> Problem | None:
    """A learner that loses a rank is lost with all of its ranks: some may be lost, and one is left."""
    fewest, plan = design.job.elastic.min_ranks, design.plan
    each = plan.world_size // plan.learners
    if not design.job.elastic.on or plan.learners == 1 or each <= fewest <= plan.world_size - each:
        return None
    what = f"learners of {each} ranks are lost whole, and {fewest} of {plan.world_size} ranks are needed"
    fix = f"choose {each} to {plan.world_size - each}"
    return Problem(where="job.elastic.min_ranks", what=what, fix=fix)


def learners_outlive_nodes(design: Design) -> Problem | None:
    """Of learners on several nodes one is left whole whichever node is lost: it has what all of them go from."""
    plan, nodes = design.plan, _nodes(design)
    if not design.job.elastic.on or plan.learners == 1 or len(set(nodes)) == 1:
        return None
    node_of = {plan.rank_on(device): nodes[device] for device in range(plan.world_size)}
    touched = [{node_of[rank] for rank in plan.ranks_of_learner(learner)} for learner in range(plan.learners)]
    lost = next((node for node in sorted(set(nodes)) if all(node in each for each in touched)), None)
    if lost is None:
        return None
    what = f"each of the {plan.learners} learners has ranks on node {lost}, and none is left whole without it"
    fix = f"order the plan's axes so that a learner's ranks are on one node, or {_OFF}"
    return Problem(where="job.elastic.min_ranks", what=what, fix=fix)


def _nodes(design: Design) -> list[int]:
    """By device of the plan the node that it is of."""
    sizes = [group.devices_per_node for group in design.cluster.groups for _ in range(group.num_nodes)]
    return [node for node, size in enumerate(sizes) for _ in range(size)][: design.plan.world_size]


def of_one_model(design: Design) -> Problem | None:
    """What is trained stays the model that the plans for fewer ranks are of."""
    if not design.job.elastic.on or design.job.factoring is None:
        return None
    what = "elastic runs whose matrices become thin factors on the way can be predicted and not trained yet"
    return Problem(where="job.elastic.min_ranks", what=what, fix=f'choose low_rank.kind = "none", or {_OFF}')


def not_compiled(design: Design) -> Problem | None:
    """Going on at once leaves no time to compile."""
    if not design.job.elastic.on or design.job.compile is Switch.OFF:
        return None
    what = "elastic runs of compiled layers would compile them again whenever ranks change"
    return Problem(where="job.compile", what=what, fix=f'choose "off", or {_OFF}')


ELASTIC_RULES = (
    Rule(name="elastic-fewest-ranks", scope=Scope.RUNTIME, check=fewest_ranks),
    Rule(name="elastic-on-processors", scope=Scope.RUNTIME, check=on_processors),
    Rule(name="elastic-of-whole-learners", scope=Scope.RUNTIME, check=of_whole_learners),
    Rule(name="elastic-learners-outlive-nodes", scope=Scope.RUNTIME, check=learners_outlive_nodes),
    Rule(name="elastic-of-one-model", scope=Scope.RUNTIME, check=of_one_model),
    Rule(name="elastic-not-compiled", scope=Scope.RUNTIME, check=not_compiled),
)
