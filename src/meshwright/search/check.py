"""Every rule of legality in one table, and the check that asks them all."""

from __future__ import annotations

from meshwright.search.constraints import CONSTRAINT_RULES
from meshwright.search.context_rules import CONTEXT_RULES
from meshwright.search.degree_rules import DEGREE_RULES
from meshwright.search.form_rules import FORM_RULES
from meshwright.search.layout_rules import LAYOUT_RULES
from meshwright.search.memory_rule import MEMORY_RULES
from meshwright.search.order_rules import ORDER_RULES
from meshwright.search.rules import ALL_SCOPES, Rule, Scope, apply
from meshwright.search.runtime_rules import RUNTIME_RULES
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design

RULES: tuple[Rule, ...] = (
    *FORM_RULES,
    *LAYOUT_RULES,
    *ORDER_RULES,
    *DEGREE_RULES,
    *CONTEXT_RULES,
    *CONSTRAINT_RULES,
    *MEMORY_RULES,
    *RUNTIME_RULES,
)


def check(design: Design, *, scopes: frozenset[Scope] = ALL_SCOPES) -> tuple[Problem, ...]:
    """Every rule of `scopes` that the design breaks, named, in the order of RULES; () when legal.

    Rules of memory and runtime are asked once no plan rule is broken, and these once it has the form of a plan.
    Raises ConfigError when the job's constraints cannot be read.
    """
    return apply(RULES, design, scopes=scopes)
