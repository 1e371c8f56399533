"""Legality as named rules: what no plan may be, and what this runtime cannot run yet; every violation at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshwright.spec.errors import Problem, name_rule
from meshwright.spec.plan import BlockGroup, Design, Plan


class Scope(StrEnum):
    """Why a design is refused.

    `form`: it is not a plan at all, and no other rule can read it. `plan`: no runtime could run it, so the search
    never emits it. `search`: it runs, and the search never emits it, for it is slow, what it costs is not known or
    another name says the same. `job`: it runs, and the job does not allow it. `memory`: it is legal and does not fit.
    `runtime`: it can be predicted and this runtime cannot train it yet.
    """

    FORM = "form"
    PLAN = "plan"
    SEARCH = "search"
    JOB = "job"
    MEMORY = "memory"
    RUNTIME = "runtime"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One law: `check` returns what is wrong with a design, or None. The name is part of every message."""

    name: str
    scope: Scope
    check: Callable[[Design], Problem | None]

    def __call__(self, design: Design) -> Problem | None:
        problem = self.check(design)
        return None if problem is None else name_rule(problem, self.name)


_AXIS, _EACH = "tensor-is-axis", "groups[*]"
ALL_SCOPES = frozenset(Scope)


def apply(rules: Iterable[Rule], design: Design, *, scopes: frozenset[Scope]) -> tuple[Problem, ...]:
    """What the rules of `scopes` find, in their order; those of a plan tell what is broken in its form too.

    Rules of a plan ask what has the form of one, and all others what is one: they are silent while a rule before them
    is broken.
    """
    rules = tuple(rules)
    for first in (Scope.FORM, Scope.PLAN):
        found = {rule.name: rule(design) for rule in rules if rule.scope is first}
        broken = {name: problem for name, problem in found.items() if problem is not None}
        if broken:
            return _causes(broken) if Scope.PLAN in scopes else ()
    rest = (rule(design) for rule in rules if rule.scope in scopes - {Scope.FORM, Scope.PLAN})
    return tuple(problem for problem in rest if problem is not None)


def _causes(broken: Mapping[str, Problem]) -> tuple[Problem, ...]:
    """The problems, by the rule that each breaks, without those that follow from another.

    That groups differ follows where one of them is wrong; and what a tensor degree divides does not matter while it is
    not the axis's.
    """
    axis = broken.get(_AXIS)
    group = axis.where.rpartition(".")[0] if axis is not None else None
    places = {problem.where.rpartition(".")[2] for problem in broken.values() if _EACH not in problem.where}
    return tuple(
        problem
        for name, problem in broken.items()
        if name == _AXIS
        or not (
            (_EACH in problem.where and problem.where.rpartition(".")[2] in places)
            or (group is not None and problem.where in (f"{group}.tensor", f"{group}.sequence_parallel"))
        )
    )


def groups_of(plan: Plan) -> Iterator[tuple[str, BlockGroup]]:
    """Every group with the path a message names it by."""
    for index, stage in enumerate(plan.stages):
        for position, group in enumerate(stage.groups):
            yield f"plan.stages[{index}].groups[{position}]", group


def divisors(number: int) -> tuple[int, ...]:
    """Every divisor of a positive whole number, ascending."""
    small = [low for low in range(1, int(number**0.5) + 1) if number % low == 0]
    large = [number // low for low in reversed(small) if low * low != number]
    return (*small, *large)


def choices(values: Iterable[object]) -> str:
    """`choose 1, 2, 4 or 8`."""
    words = [str(value) for value in values]
    if len(words) > 8:
        words = [*words[:6], "...", words[-1]]
    if len(words) < 2:
        return f"choose {words[0]}" if words else "there is no legal choice"
    return f"choose {', '.join(words[:-1])} or {words[-1]}"
