"""Every rule of legality in one table, and the check that asks them all."""

from __future__ import annotations

from functools import partial

from meshwright.search.asked_rules import ASKED_RULES
from meshwright.search.compression_rules import COMPRESSION_RULES
from meshwright.search.constraints import CONSTRAINT_RULES
from meshwright.search.context_rules import CONTEXT_RULES
from meshwright.search.degree_rules import DEGREE_RULES
from meshwright.search.elastic_rules import ELASTIC_RULES
from meshwright.search.extent_rules import EXTENT_RULES
from meshwright.search.form_rules import FORM_RULES
from meshwright.search.grid_rules import GRID_RULES
from meshwright.search.job_rules import JOB_RULES, check_job
from meshwright.search.layout_rules import LAYOUT_RULES
from meshwright.search.learner_rules import LEARNER_RULES
from meshwright.search.low_rank_rules import LOW_RANK_RULES
from meshwright.search.memory_rule import MEMORY_RULES
from meshwright.search.order_rules import ORDER_RULES
from meshwright.search.prefix_rules import PREFIX_RULES
from meshwright.search.quorum_rules import QUORUM_RULES
from meshwright.search.rules import ALL_SCOPES, Rule, Scope, apply
from meshwright.search.runtime_rules import RUNTIME_RULES
from meshwright.search.skip_rules import SKIP_RULES
from meshwright.search.torchft_rules import TORCHFT_RULES
from meshwright.search.training_rules import TRAINING_RULES
from meshwright.spec.errors import Gathering, Problem
from meshwright.spec.plan import Design

RULES: tuple[Rule, ...] = (
    *FORM_RULES,
    *JOB_RULES,
    *LAYOUT_RULES,
    *TRAINING_RULES,
    *ORDER_RULES,
    *DEGREE_RULES,
    *EXTENT_RULES,
    *LEARNER_RULES,
    *QUORUM_RULES,
    *COMPRESSION_RULES,
    *CONTEXT_RULES,
    *PREFIX_RULES,
    *GRID_RULES[:-1],
    *LOW_RANK_RULES[:1],
    *SKIP_RULES[:-1],
    *CONSTRAINT_RULES,
    *MEMORY_RULES,
    *RUNTIME_RULES,
    *GRID_RULES[-1:],
    *LOW_RANK_RULES[1:],
    *SKIP_RULES[-1:],
    *ELASTIC_RULES,
    *TORCHFT_RULES,
    *ASKED_RULES,
)

ANSWERS = frozenset({Scope.PLAN, Scope.SEARCH})


def check(design: Design, *, scopes: frozenset[Scope] = ALL_SCOPES) -> tuple[Problem, ...]:
    """Every rule of `scopes` that the design breaks, named, in the order of RULES; () when legal.

    Other rules are asked once no rule of plans is broken, and these once it has the form of a plan.
    Raises ConfigError when the job's constraints cannot be read.
    """
    return apply(RULES, design, scopes=scopes)


def check_answer(design: Design, *, scopes: frozenset[Scope] = ANSWERS) -> tuple[Problem, ...]:
    """Why the search would never answer the design's own job with it; () where it could.

    What no plan can mend of the job, what the job does not allow, whatever else the plan breaks, and every rule of
    `scopes` that is broken: those of plans, and unless it is to run whatever it costs those of the search.
    """
    gathered = Gathering()
    gathered.attempt(lambda: check_job(design.model, design.cluster, design.job))
    for rule in ASKED_RULES:
        problem = gathered.attempt(partial(rule, design))
        gathered.problems += [] if problem is None else [problem]
    found = gathered.attempt(lambda: check(design, scopes=scopes)) or ()
    told = {(problem.where, problem.what) for problem in gathered.problems}
    return (*gathered.problems, *(problem for problem in found if (problem.where, problem.what) not in told))
