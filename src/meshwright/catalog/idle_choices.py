"""What a job allows and its own constraints leave no plan to take: ways of meeting, precisions, stages left out."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.errors import Problem
from meshwright.spec.job import Constraints, JobSpec
from meshwright.spec.synchronize import SyncKind

WHAT = "does nothing"
ONE_OF_TWO = "leave one of the two out"


def ruled_out(constraints: Constraints, column: str, value: str, *, usual: str = "") -> str:
    """`constraints.fix.sync` or `constraints.forbid[0]`: what keeps plans from `value` in `column`; empty where nothing
    does. To forbid a column whole leaves what is `usual`."""
    fixed = constraints.fix.get(column)
    if fixed is not None and str(fixed) != value:
        return f"constraints.fix.{column}"
    for index, text in enumerate(constraints.forbid):
        name, equals, said = (part.strip() for part in text.partition("="))
        if name == column and (said == value if equals else value != usual):
            return f"constraints.forbid[{index}]"
    return ""


def all_one(constraints: Constraints, *columns: str) -> str:
    """The constraint that leaves one rank along one of `columns`; empty where none does."""
    for column in (*columns, "devices"):
        if str(constraints.fix.get(column, "")).strip() == "1":
            return f"constraints.fix.{column}"
    whole = (index for index, text in enumerate(constraints.forbid) if text.strip() in columns)
    return next((f"constraints.forbid[{index}]" for index in whole), "")


def learners_ruled_out(job: JobSpec) -> str:
    """The constraint by which no plan has any of the learners that the job allows; empty where none, or it allows
    none."""
    asked, fixed = job.synchronize, job.constraints.fix.get("sync")
    kinds = [kind for kind in SyncKind if kind.has_learners]
    kinds = [kind for kind in kinds if (kind in asked.kinds if fixed is None else kind.value == str(fixed))]
    found = [_no_meeting(job, kind) for kind in kinds]
    return found[0] if found and all(found) else ""


def _no_meeting(job: JobSpec, kind: SyncKind) -> str:
    usual = SyncKind.EVERY_STEP.value
    alone = all_one(job.constraints, "replicate", "data") if kind.has_learners else ""
    return ruled_out(job.constraints, "sync", kind.value, usual=usual) or alone


def unread_choices(job: JobSpec) -> Iterator[Problem]:
    """Every choice of the job that its constraints rule out, or that it names already."""
    for index, kind in enumerate(job.synchronize.kinds):
        yield from _told(f"synchronize.kinds[{index}]", _no_meeting(job, kind))
    for index, compression in enumerate(job.synchronize.compressions):
        ruled = ruled_out(job.constraints, "sync", compression.kind, usual=SyncKind.EVERY_STEP.value)
        yield from _told(f"synchronize.compressions[{index}]", ruled)
    for index, precision in enumerate(job.other_precisions):
        again = "precision" if precision == job.precision else ""
        again = again or ("other_precisions" if precision in job.other_precisions[:index] else "")
        where, ruled = f"other_precisions[{index}]", ruled_out(job.constraints, "precision", precision.value)
        if again and not ruled:
            yield Problem(what=WHAT, where=where, why=f"{again} says it already", fix="leave it out")
        yield from _told(where, ruled)
    if job.skip.share > 0.0:
        yield from _told("skip.share", all_one(job.constraints, "pipeline"))


def _told(where: str, ruled: str) -> Iterator[Problem]:
    if ruled:
        yield Problem(what=WHAT, where=where, why=f"{ruled} rules it out", fix=ONE_OF_TWO)
