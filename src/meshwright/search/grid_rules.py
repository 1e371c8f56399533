"""Rules of squares and cubes of tensor ranks: what they divide must divide, and what they are not combined with."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cost.grid import undivided
from meshwright.schedule import planned
from meshwright.search.rules import Rule, Scope
from meshwright.search.runtime_rules import EIGHT_BIT_GRADIENTS, EMULATED_PRECISIONS
from meshwright.spec.errors import Problem
from meshwright.spec.job import Switch
from meshwright.spec.model import Attention, FeedForward, Mixer, Transform
from meshwright.spec.plan import Design, Sharding, TensorGrid

_WHERE = "plan.tensor_grid"


def grid_closes(design: Design) -> Problem | None:
    """The ranks of the tensor axis make up a square or a cube."""
    plan, grid = design.plan, design.plan.tensor_grid
    if grid is TensorGrid.LINE or (plan.tensor > 1 and grid.side(plan.tensor) ** grid.dims == plan.tensor):
        return None
    sizes = ", ".join(str(side**grid.dims) for side in (2, 3, 4))
    what = f"{plan.tensor} tensor ranks are no {grid.value}"
    return Problem(where=_WHERE, what=what, fix=f"choose line, or a tensor axis of {sizes} ...")


def grid_alone(design: Design) -> Problem | None:
    """Of a model of attention and feed-forwards every rank holds whole sequences, and nothing else divides them."""
    plan = design.plan
    if plan.tensor_grid is TensorGrid.LINE:
        return None
    against = {
        "sequence parallel": plan.first_group.sequence_parallel,
        f"a context axis of {plan.context}": plan.context > 1,
        f"{plan.schedule.slices} slices": plan.schedule.slices > 1,
        "a grid of experts": plan.experts is not None,
        "frozen blocks": bool(plan.frozen_blocks),
    }
    for what, there in against.items():
        if there:
            return Problem(where=_WHERE, what=f"a {plan.tensor_grid.value} of tensor ranks and {what}", fix=_fix(what))
    for index, layer in enumerate(design.model.layers):
        odd = [part for part in layer.parts if not isinstance(part, (Attention, FeedForward))]
        if odd or layer.extra_parameters:
            what = f"no way is known to lay {_named(odd)} on a {plan.tensor_grid.value}"
            return Problem(where=_WHERE, what=what, why=f"model.layers[{index}]", fix="choose line")
    return None


def _fix(what: str) -> str:
    return f"choose line, or leave out {what}"


def _named(parts: Sequence[Mixer | Transform]) -> str:
    return f"a {type(parts[0]).__name__}" if parts else "parameters that no product uses"


def grid_divides(design: Design) -> Problem | None:
    """A square or cube divides sequences of a microbatch and every feature evenly."""
    plan, grid = design.plan, design.plan.tensor_grid
    if grid is TensorGrid.LINE or grid_closes(design) is not None:
        return None
    parts = grid.token_parts(plan.tensor)
    if plan.microbatch % parts:
        what = (
            f"a {grid.value} of {plan.tensor} divides sequences of a microbatch in {parts}, and not {plan.microbatch}"
        )
        return Problem(where="plan.microbatch", what=what, fix=f"choose a multiple of {parts}")
    for where, what in undivided(design.model, grid=grid, side=grid.side(plan.tensor)):
        return Problem(where=_WHERE, what=what, why=f"model.{where}", fix="choose line, or fewer tensor ranks")
    return None


def grid_runs(design: Design) -> Problem | None:
    """What the runtime combines with a square or cube of tensor ranks."""
    plan, grid = design.plan, design.plan.tensor_grid
    if grid is TensorGrid.LINE:
        return None
    sharding = plan.first_group.sharding
    against = (
        (plan.first_group.precision in EMULATED_PRECISIONS, f"{plan.first_group.precision.value} products", "bf16"),
        (planned.splits(plan.schedule) and plan.pipeline > 1, f"split backwards of {plan.schedule.kind.value}", "1f1b"),
        (
            plan.gradients.precision in EIGHT_BIT_GRADIENTS,
            f"gradients that meet in {plan.gradients.precision.value}",
            "bf16 or fp32",
        ),
        (
            grid is TensorGrid.CUBE and sharding is not Sharding.NONE,
            sharding.value,
            "square, or replicate",
        ),
        (design.job.compile is Switch.ON, "compiled layers", '"off"'),
    )
    for refused, what, fix in against:
        if refused:
            told = f"{what} beside a {grid.value} of tensor ranks can be predicted and not trained yet"
            return Problem(where=_WHERE, what=told, fix=f"choose {fix}, or line")
    return None


GRID_RULES = (
    Rule(name="tensor-grid-closes", scope=Scope.PLAN, check=grid_closes),
    Rule(name="tensor-grid-alone", scope=Scope.PLAN, check=grid_alone),
    Rule(name="tensor-grid-divides", scope=Scope.PLAN, check=grid_divides),
    Rule(name="runtime-tensor-grid", scope=Scope.RUNTIME, check=grid_runs),
)
