"""Rules of models whose matrices are products of two thin ones: what they are not combined with."""

from __future__ import annotations

from meshwright.search.rules import Rule, Scope
from meshwright.search.runtime_rules import EMULATED_PRECISIONS
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design, TensorGrid


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


def _first(design: Design) -> str | None:
    """Where the model has its first thin matrix; None where it has none."""
    layers = enumerate(design.model.layers)
    return next((f"model.layers[{index}].ranks" for index, layer in layers if layer.ranks), None)


LOW_RANK_RULES = (
    Rule(name="low-rank-line", scope=Scope.PLAN, check=ranks_on_line),
    Rule(name="runtime-low-rank", scope=Scope.RUNTIME, check=ranks_trained),
)
