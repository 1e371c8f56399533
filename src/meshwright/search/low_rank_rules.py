"""Rules of models whose matrices are products of two thin ones, or come to be: what they are not combined with."""

from __future__ import annotations

from dataclasses import replace

from meshwright.schedule import planned
from meshwright.search.rules import Rule, Scope
from meshwright.search.runtime_rules import EMULATED_PRECISIONS
from meshwright.spec.errors import Problem
from meshwright.spec.low_rank import Pufferfish, switches_last
from meshwright.spec.model import MatrixRank
from meshwright.spec.plan import Design, TensorGrid
from meshwright.spec.ranks import factorable

_TRAINING = "job.low_rank"


def ranks_on_line(design: Design) -> Problem | None:
    """Thin matrices have no dim for the second direction of a square or a cube."""
    plan = design.plan
    if plan.tensor_grid is TensorGrid.LINE or plan.tensor == 1 or _first(design) is None:
        return None
    what = f"no way is known to lay thin matrices on a {plan.tensor_grid.value}"
    fix = "choose line, or the model of whole matrices"
    return Problem(where="plan.tensor_grid", what=what, why=_first(design) or "", fix=fix)


def ranks_trained(design: Design) -> Problem | None:
    """Products of thin matrices are not rounded: tensor ranks would scale what is between them each by its own."""
    precision = design.plan.first_group.precision
    if precision not in EMULATED_PRECISIONS or _first(design) is None:
        return None
    what = f"{precision.value} products of thin matrices can be predicted and not trained yet"
    where = "plan.stages[0].groups[0].precision"
    return Problem(where=where, what=what, why=_first(design) or "", fix="choose bf16, or the model of whole matrices")


def a_round_ends(design: Design) -> Problem | None:
    """Learners become low rank where they are one: at the end of a round, before that of the run."""
    spec, plan, steps = design.job.factoring, design.plan, design.job.total_steps
    if spec is None or plan.learners == 1:
        return None
    due, every = switches_last(spec, total_steps=steps), plan.gradients.rounds.every
    if -(-due // every) * every < steps:
        return None
    met = f"{plan.learners} learners meet every {every} steps"
    name = "switch_at" if isinstance(spec, Pufferfish) else "switch_by"
    last = (steps - 1) // every * every
    fix = f"choose low_rank.{name} = {last}" if last else f"choose synchronize.every below {steps}"
    what = f"{met}, and no round ends from step {due}, when the switch is due, to the last one, {steps}"
    return Problem(where=_TRAINING, what=what, fix=f"{fix}, or drop low_rank")


def decay_in_time(design: Design) -> Problem | None:
    """Gradients of decay come with those of inputs, before those of matrices that they are added to."""
    spec, plan = design.job.factoring, design.plan
    if spec is None or not spec.frobenius_decay or plan.pipeline == 1 or not planned.splits(plan.schedule):
        return None
    what = f"{plan.schedule.kind.value} puts off the gradients of matrices, which Frobenius decay is added to"
    return Problem(where=_TRAINING, what=what, fix="set low_rank.frobenius_decay = 0, or choose 1f1b")


def comes_to_be_laid(design: Design) -> Problem | None:
    """What a plan cannot lay of a model of thin matrices, it does not become one for."""
    model = design.model
    first = next((block for block, layer in enumerate(model.layers, start=1) if factorable(layer.places)), None)
    if design.job.factoring is None or first is None:
        return None
    thin = (MatrixRank(name=next(iter(factorable(model.layers[first - 1].places))), rank=1),)
    design = replace(design, model=model.with_ranks({first: thin}))
    found = ranks_on_line(design) or ranks_trained(design)
    fix = "choose another, or drop low_rank"
    return None if found is None else replace(found, why=f"{_TRAINING} gives the model some", fix=fix)


def _first(design: Design) -> str | None:
    """Where the model has its first thin matrix; None where it has none."""
    layers = enumerate(design.model.layers)
    return next((f"model.layers[{index}].ranks" for index, layer in layers if layer.ranks), None)


LOW_RANK_RULES = (
    Rule(name="low-rank-line", scope=Scope.PLAN, check=ranks_on_line),
    Rule(name="runtime-low-rank", scope=Scope.RUNTIME, check=ranks_trained),
    Rule(name="low-rank-training-rounds", scope=Scope.RUNTIME, check=a_round_ends),
    Rule(name="low-rank-training-decay", scope=Scope.RUNTIME, check=decay_in_time),
    Rule(name="low-rank-training-layout", scope=Scope.RUNTIME, check=comes_to_be_laid),
)
