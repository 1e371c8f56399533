"""Rules of microbatches that leave out stages (SkipPipe, 2502.19913): what the job allows, and what keeps it sound."""

from __future__ import annotations

from meshwright.schedule import paths as path_lines
from meshwright.schedule import planned
from meshwright.schedule.paths import Paths
from meshwright.search.rules import Rule, Scope
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design
from meshwright.spec.skip import ROUNDED, Swap
from meshwright.spec.units import format_percent

_WHERE = "plan.schedule.paths"


def paths_are_asked(design: Design) -> Problem | None:
    """Microbatches leave out no more layers than the job allows, and pass stages in turn unless it allows that."""
    plan, allowed, paths = design.plan, design.job.skip, _paths(design)
    left_out = plan.skipped_share
    if not paths:
        return None
    if left_out > allowed.share + ROUNDED:
        what = f"microbatches leave out {format_percent(left_out)} of the layers and the job allows "
        what += format_percent(allowed.share) if allowed.share else "none"
        fix = f"choose a plan of whole passes, or allow it with --set job.skip.share={left_out:.3g}"
        return Problem(where=_WHERE, what=what, why="what is trained so is another model", fix=fix)
    if allowed.swap is Swap.NONE and any(path != tuple(sorted(path)) for path in paths):
        fix = f"choose stages in turn, or allow it with --set job.skip.swap={Swap.NEIGHBOURS.value}"
        return Problem(where=_WHERE, what="stages are passed out of turn and the job allows none", fix=fix)
    return None


def paths_are_even(design: Design) -> Problem | None:
    """Stages between the first and the last learn from as many microbatches each, give or take one."""
    inner = path_lines.visits(_paths(design), stages=len(design.plan.stages))[1:-1]
    if not inner or max(inner) - min(inner) <= 1:
        return None
    most, least = inner.index(max(inner)) + 1, inner.index(min(inner)) + 1
    what = f"{max(inner)} microbatches pass stage {most} and {min(inner)} stage {least}"
    return Problem(where=_WHERE, what=what, why="stages would learn unevenly", fix="let as many pass each of them")


def paths_are_trained(design: Design) -> Problem | None:
    """Backward comes to every stage on a path, and paths are of what was shown to train on them."""
    plan = design.plan
    beside = {
        "around frozen blocks": bool(plan.frozen_blocks),
        "of learners": plan.learners > 1,
        "beside context ranks": plan.context > 1,
    }
    for how, refused in beside.items():
        if plan.schedule.paths and refused:
            what = f"paths of microbatches {how} can be predicted and not trained yet"
            return Problem(where=_WHERE, what=what, fix="choose a plan of whole passes, or do without")
    return None


def _paths(design: Design) -> Paths:
    """The paths of the plan; none where another rule refuses its table."""
    entry = design.plan.schedule
    return () if planned.table_problems(entry, pipeline=design.plan.pipeline) else path_lines.read(entry.paths)


SKIP_RULES = (
    Rule(name="paths-are-asked", scope=Scope.PLAN, check=paths_are_asked),
    Rule(name="paths-are-even", scope=Scope.PLAN, check=paths_are_even),
    Rule(name="runtime-paths", scope=Scope.RUNTIME, check=paths_are_trained),
)
