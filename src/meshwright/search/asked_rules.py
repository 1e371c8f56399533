"""Rules of what a job allows: precisions, learners and compressed gradients, with each of which numerics change."""

from __future__ import annotations

import json

from meshwright.cost.meeting import meetings_of
from meshwright.search.job_rules import allowed_meetings, allowed_precisions
from meshwright.search.rules import Rule, Scope, groups_of
from meshwright.search.used import used_of
from meshwright.spec import codec
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design


def precision_is_asked(design: Design) -> Problem | None:
    """Block groups are in precisions that the job allows; the first that is not is named."""
    allowed = allowed_precisions(design.job, used_of(design.plan, design.cluster))
    names = " or ".join(kind.value for kind in allowed)
    for where, group in groups_of(design.plan):
        if group.precision not in allowed:
            what = f"{group.precision.value} is not the job's {names}"
            return Problem(where=f"{where}.precision", what=what, fix=f"choose {names}")
    return None


def learners_are_asked(design: Design) -> Problem | None:
    """Learners meet in a way that the job allows."""
    kind, allowed = design.plan.gradients.kind, allowed_meetings(design.job)
    if kind in allowed or not kind.has_learners:
        return None
    names = " or ".join(allowed)
    what = f"the job allows {names or 'no way'} of meeting, not {kind.value}: numerics change with it"
    fix = f"choose {names}, or allow it with --set 'job.synchronize.kinds=[\"{kind.value}\"]'"
    return Problem(where="plan.gradients.kind", what=what, fix=fix)


def compression_is_asked(design: Design) -> Problem | None:
    """Gradients are compressed in a way that the job allows, or not at all."""
    compression, meetings = design.plan.gradients.compression, allowed_meetings(design.job)
    said = [each.compression for each in meetings_of(design.job)]
    allowed = [each for each in said if each is not None and each.kind in meetings]
    if compression is None or compression in allowed:
        return None
    names = " or ".join(each.words for each in allowed)
    what = f"the job allows {names or 'no compression'} of gradients, not {compression.words}: numerics change with it"
    told = ", ".join(f"{name} = {json.dumps(value)}" for name, value in codec.encode(compression).items())
    fix = f"leave it out, or allow it with --set 'job.synchronize.compressions=[{{{told}}}]'"
    return Problem(where="plan.gradients.compression", what=what, fix=fix)


ASKED_RULES: tuple[Rule, ...] = (
    Rule(name="precision-is-asked", scope=Scope.JOB, check=precision_is_asked),
    Rule(name="learners-are-asked", scope=Scope.JOB, check=learners_are_asked),
    Rule(name="compression-is-asked", scope=Scope.JOB, check=compression_is_asked),
)
