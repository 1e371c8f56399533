"""Replan: a run goes on by another design, with all that it has learned, or as a checkpoint of another one says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright import cost, parallel
from meshwright.cost.learner_holdings import MOMENTUM
from meshwright.parallel.refactor import refactor
from meshwright.spec.low_rank import matrices_with_ranks
from meshwright.spec.plan import Design
from meshwright.spec.ranks import factor_names
from meshwright.train.observe.metrics import Yardstick

if TYPE_CHECKING:
    from meshwright.train.run import Run


def lay_again(run: Run, design: Design) -> None:
    """The run is of `design`, which has the plan of the present one and other ranks; no value is given yet."""
    run.store.wait()
    run.design, own = design, replace(design, plan=design.plan.of_learner())
    run.laid = parallel.lay(own, run.learners.mesh, device=run.laid.device, seed=None, recorder=run.profiler)
    run.optimizer = parallel.build_optimizer(run.laid, design.job.optimizer)
    if run.outer is not None:
        run.outer.follow(design, laid=run.laid)
    run.store.follow(design)
    run.profiler.begin_again(design, first_step=run.state.step + 1)
    run.profiler.watch(parts=run.laid.parts, optimizer=run.optimizer)
    if run.observer is not None:
        run.observer.measure_against(Yardstick.of(cost.predict(design)))


def replan(run: Run, design: Design) -> None:
    """The run goes on by `design`: matrices that have ranks there and had none are factored, those that had the same
    are balanced anew, and moments of factors begin. What is laid of both models lies in memory meanwhile. Collective.

    Learners go on as one: from factors of their mean, which one of all ranks makes, with the momentum of what stays.
    """
    outer = run.outer
    if outer is not None:
        outer.come_together()
    momentum = {} if outer is None else outer.of_all(MOMENTUM)
    source, ranks = run.laid_state(), matrices_with_ranks(design.model)
    target = source
    if design.model != run.design.model:
        had = matrices_with_ranks(run.design.model)
        ranks = {name: rank for name, rank in ranks.items() if name not in had}
        lay_again(run, design)
        target = run.laid_state()
    refactor(source, target, ranks=ranks, group=run.learners.everyone, device=run.laid.device)
    if outer is not None:
        fresh = {name for matrix in ranks for name in factor_names(matrix)}
        left = {name: x for name, x in momentum.items() if name not in fresh}
        outer.go_on_as_one(run.state.step, momentum=left)
