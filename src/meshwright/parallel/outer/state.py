"""The state of learners as one run's: what every learner has of its own, and the mean that any other plan goes on from.

In a checkpoint `model.*` is the mean of all learners and `optimizer.*` is the first one's, so that a plan of another
number of learners, or of none, reads it as any other. Beside them are `learner.<i>.model.*`, the optimizers of the
others as `learner.<i>.optimizer.*`, and `outer.*`: what meeting keeps between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.cost.holdings import OPTIMIZER, PARAMETERS, Contents, Holding, holdings
from meshwright.cost.learner_holdings import OF_ALL, OUTER, SENT, Origins, donor_of, learner_holdings, own_name
from meshwright.parallel.outer.learners import Learners
from meshwright.parallel.outer.sync import OuterSync
from meshwright.parallel.portable import RESIDUAL, HasParts, portable
from meshwright.parallel.relocate import Beside, State
from meshwright.parallel.relocate import state_of as state_of_all
from meshwright.spec.plan import Design


def state_of(
    design: Design,
    *,
    learners: Learners,
    laid: HasParts,
    optimizer: torch.optim.Optimizer | None = None,
    contents: Contents = Contents.TRAINING,
) -> State:
    """What this rank's learner has, by the names of every plan; of all processes it is told what their learners have.

    As `relocate.state_of` where there is one learner.
    """
    plan = design.plan
    if plan.learners == 1:
        return state_of_all(design, laid=laid, optimizer=optimizer, contents=contents)
    own = replace(design, plan=plan.of_learner())
    held: dict[str, Holding] = {}
    for learner in range(plan.learners):
        ranks = plan.ranks_of_learner(learner)
        for name, holding in holdings(own, contents=contents, processes=ranks).items():
            known = held.get(name, holding)
            held[name] = replace(known, parts={**known.parts, **holding.parts})
    found = portable(laid, optimizer if contents is Contents.TRAINING else None)
    own_residual = f"{RESIDUAL}learner.{learners.index}."
    left = {name.replace(RESIDUAL, own_residual, 1): x for name, x in found.residuals.items()}
    return State(held=held, own=replace(found, residuals=left))


def saved(state: State, outer: OuterSync) -> State:
    """`state`, of `state_of`, as a checkpoint keeps it of learners. Collective."""
    index = outer.learners.index
    mean = {f"{PARAMETERS}{name}": x for name, x in outer.mean().items()}
    tensors: dict[str, Tensor] = {}
    held = dict(state.held)
    for name, x in state.tensors.items():
        own = _own_name(name, index)
        tensors[own] = x
        held[own] = state.held[name]
        if name.startswith(PARAMETERS):
            tensors[name] = mean.get(name, x).to(x.dtype)
    beside = _named(outer.tensors(), index) | _left(outer) | dict(state.own.residuals)
    return State(held=held, own=replace(state.own, tensors=tensors, copies=(), residuals=beside))


def loaded(state: State, outer: OuterSync, *, step: int) -> State:
    """`state` as a checkpoint of `step`, saved by learners that met as these, is loaded into it."""
    index = outer.learners.index
    stored = {name: _own_name(name, index) for name in state.tensors}
    own = replace(state.own, residuals={**state.own.residuals, **_left(outer)})
    return replace(state, own=own, beside=Beside(names=stored, tensors=_named(outer.expected(step), index)))


def remembered(design: Design, state: State, outer: OuterSync, *, origins: Origins | None = None) -> State:
    """`state`, of `state_of` these learners of `design`, with all that meeting keeps, while something travels: what a
    copy in memory has, and what goes on from one where learner i goes on as learner `origins[i]` (`learner_holdings`).
    """
    index = outer.learners.index
    origins = range(outer.learners.count) if origins is None else origins
    origin = origins[index]
    names = {name: own_name(name, donor_of(origins) if origin is None else origin) for name in state.tensors}
    tensors = {names[name]: x for name, x in state.tensors.items()}
    for what, name, x in outer.remembered():
        if what in OF_ALL:
            tensors.setdefault(f"{OUTER}{what}.{name}", x)
        elif origin is not None:
            tensors.setdefault(own_name(f"{OUTER}{what}.{name}", origin), x)
    own = replace(state.own, tensors=tensors, copies=tuple((names[name], x) for name, x in state.own.copies))
    return State(held=learner_holdings(design, origins=origins), own=own)


def _own_name(name: str, index: int) -> str:
    """What is called `name` in every plan, as learner `index` keeps its own in a checkpoint."""
    return name if name.startswith(OPTIMIZER) and index == 0 else f"learner.{index}.{name}"


def _named(kept: Iterable[tuple[str, str, Tensor]], index: int) -> dict[str, Tensor]:
    """A parameter that this rank holds twice is kept once."""
    found: dict[str, Tensor] = {}
    for what, name, x in kept:
        owner = f"learner.{index}." if what == SENT else ""
        found.setdefault(f"{owner}{OUTER}{what}.{name}", x)
    return found


def _left(outer: OuterSync) -> dict[str, Tensor]:
    """What rounding left, which is of this learner and rank alone."""
    own = f"{RESIDUAL}learner.{outer.learners.index}.{OUTER}{outer.learners.mesh.rank}"
    return {f"{own}.{number}": x for number, x in enumerate(outer.left())}
