"""Every rule of legality in one table, and the check that asks them all."""

from __future__ import annotations

import json
from collections.abc import Sequence

from meshwright.cost.meeting import meetings_of
from meshwright.search.compression_rules import COMPRESSION_RULES
from meshwright.search.constraints import CONSTRAINT_RULES
from meshwright.search.context_rules import CONTEXT_RULES
from meshwright.search.degree_rules import DEGREE_RULES
from meshwright.search.elastic_rules import ELASTIC_RULES
from meshwright.search.extent_rules import EXTENT_RULES
from meshwright.search.form_rules import FORM_RULES
from meshwright.search.grid_rules import GRID_RULES
from meshwright.search.job_rules import JOB_RULES, allowed_meetings, allowed_precisions, check_job
from meshwright.search.layout_rules import LAYOUT_RULES
from meshwright.search.learner_rules import LEARNER_RULES
from meshwright.search.low_rank_rules import LOW_RANK_RULES
from meshwright.search.memory_rule import MEMORY_RULES
from meshwright.search.order_rules import ORDER_RULES
from meshwright.search.prefix_rules import PREFIX_RULES
from meshwright.search.quorum_rules import QUORUM_RULES
from meshwright.search.rules import ALL_SCOPES, Rule, Scope, apply, groups_of
from meshwright.search.runtime_rules import RUNTIME_RULES
from meshwright.search.skip_rules import SKIP_RULES
from meshwright.search.torchft_rules import TORCHFT_RULES
from meshwright.search.training_rules import TRAINING_RULES
from meshwright.spec import codec
from meshwright.spec.cluster import Precision
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

    What no plan can mend of the job, a precision or a way of meeting that the job does not allow, and every rule of
    `scopes` that is broken: those of plans, and unless it is to run whatever it costs those of the search.
    """
    gathered = Gathering()
    gathered.attempt(lambda: check_job(design.model, design.cluster, design.job))
    allowed = gathered.attempt(lambda: allowed_precisions(design.job, design.cluster))
    if allowed is not None:
        gathered.problems += _other_precisions(design, allowed)
    meetings = gathered.attempt(lambda: allowed_meetings(design.job))
    if meetings is not None:
        gathered.problems += [*_other_meetings(design, meetings), *_other_compressions(design, meetings)]
    found = gathered.attempt(lambda: check(design, scopes=scopes)) or ()
    told = {(problem.where, problem.what) for problem in gathered.problems}
    return (*gathered.problems, *(problem for problem in found if (problem.where, problem.what) not in told))


def _other_precisions(design: Design, allowed: Sequence[Precision]) -> list[Problem]:
    """The first block group in a precision that the job does not allow."""
    names = " or ".join(kind.value for kind in allowed)
    for where, group in groups_of(design.plan):
        if group.precision not in allowed:
            what, fix = f"{group.precision.value} is not the job's {names}", f"choose {names}"
            return [Problem(where=f"{where}.precision", what=what, why="rule precision-is-asked", fix=fix)]
    return []


def _other_meetings(design: Design, allowed: Sequence[str]) -> list[Problem]:
    """A way of meeting that the job does not allow."""
    kind = design.plan.gradients.kind
    if kind in allowed or not kind.has_learners:
        return []
    names = " or ".join(allowed)
    what = f"the job allows {names or 'no way'} of meeting, not {kind.value}: numerics change with it"
    fix = f"choose {names}, or allow it with --set 'job.synchronize.kinds=[\"{kind.value}\"]'"
    return [Problem(where="plan.gradients.kind", what=what, why="rule learners-are-asked", fix=fix)]


def _other_compressions(design: Design, meetings: Sequence[str]) -> list[Problem]:
    """Gradients compressed in a way that the job does not allow."""
    compression, said = design.plan.gradients.compression, [each.compression for each in meetings_of(design.job)]
    allowed = [each for each in said if each is not None and each.kind in meetings]
    if compression is None or compression in allowed:
        return []
    names = " or ".join(each.words for each in allowed)
    what = f"the job allows {names or 'no compression'} of gradients, not {compression.words}: numerics change with it"
    told = ", ".join(f"{name} = {json.dumps(value)}" for name, value in codec.encode(compression).items())
    fix = f"leave it out, or allow it with --set 'job.synchronize.compressions=[{{{told}}}]'"
    return [Problem(where="plan.gradients.compression", what=what, why="rule compression-is-asked", fix=fix)]
