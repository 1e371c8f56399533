"""Rules of training: which blocks a plan may leave as they are."""

from __future__ import annotations

from meshwright.search.rules import Rule, Scope
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design


def trains_something(design: Design) -> Problem | None:
    """Some block is trained."""
    plan = design.plan
    if plan.first_trained_block < plan.groups[-1].stop:
        return None
    return Problem(where="plan.stages[*].groups[*].training", what="every block is frozen", fix="train one at least")


def tied_ends_train_alike(design: Design) -> Problem | None:
    """A table that the embedding and the head share is trained at both or at neither."""
    ends = {"embedding": 0, "head": len(design.model.blocks) - 1}
    frozen = [name for name, block in ends.items() if block in design.plan.frozen_blocks]
    if not design.model.head.tied or len(frozen) != 1:
        return None
    one, other = (*frozen, *(name for name in ends if name not in frozen))
    return Problem(
        where=f"plan.stages[*].groups[*].training of block {ends[one]}",
        what=f"the {one} is frozen and the {other}, which has the same table, is trained",
        fix="freeze both or neither",
    )


TRAINING_RULES = (
    Rule(name="trains-something", scope=Scope.PLAN, check=trains_something),
    Rule(name="tied-ends-train-alike", scope=Scope.PLAN, check=tied_ends_train_alike),
)
