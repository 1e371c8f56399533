"""What is wrong with a job's settings of low rank training."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.spec.errors import Problem
from meshwright.spec.job import JobSpec, Switch
from meshwright.spec.low_rank import LowRank, Pufferfish, switches_last

_STEPS = ("rewarm", "switch_at", "interval", "switch_by")
_SHARES = ("ratio", "least_ratio", "tolerance")
_COUNTS = {"dense_layers": 0, "least_dim": 1, "refactorise_every": 0, "recovery_steps": 1, "settled": 1}
NAME = "low_rank"


def low_rank_problems(job: JobSpec) -> Iterator[Problem]:
    """Every number that none can have, and what of the job it does not go with."""
    if NAME in job.techniques:
        fix = "leave it out there and set job.low_rank.kind: pufferfish or cuttlefish"
        yield Problem(what="low_rank is named twice or without its settings", where="techniques", fix=fix)
    spec = job.factoring
    if spec is None:
        return
    wrong = list(_number_problems(spec))
    yield from wrong
    if job.compile is not Switch.OFF:
        why = "layers that are compiled are the dense ones"
        what = f"{job.compile.value} does not go with low rank training"
        yield Problem(what=what, where="compile", why=why, fix="choose off")
    if wrong or job.batch_tokens < 1:
        return
    total = job.total_steps
    last = switches_last(spec, total_steps=total)
    if last >= total:
        field = "switch_at" if isinstance(spec, Pufferfish) else "switch_by"
        what = f"the switch after step {last:,} is not inside a run of {total:,} steps"
        fix = f"choose a share below 1, as 0.25, or at most {max(total - 1, 1):,} steps"
        yield Problem(what=what, where=f"low_rank.{field}", fix=fix)


def _number_problems(spec: LowRank) -> Iterator[Problem]:
    for name in _STEPS:
        value = getattr(spec, name, 1.0)
        if not 0 < value < math.inf:
            why = "below 1 it is a share of the run, from 1 on steps"
            yield _problem(name, f"{value} is not finite and above 0", why=why, fix="0.25 is a quarter of the run")
    for name in _SHARES:
        value = getattr(spec, name, 0.5)
        if not 0 < value < 1:
            yield _problem(name, f"{value} is not between 0 and 1", fix="0.25 is a quarter")
    for name, least in _COUNTS.items():
        value = getattr(spec, name, least)
        if value < least:
            yield _problem(name, f"{value} is less than {least}", fix=f"choose {least} or more")
    if not 0 <= spec.gain < 1:
        yield _problem("gain", f"{spec.gain} is not from 0 to below 1", fix="0.05 asks for a step faster by 5 %")
    if not 0 <= spec.frobenius_decay < math.inf:
        yield _problem("frobenius_decay", f"{spec.frobenius_decay} is not finite and from 0", fix="0 is no decay")
    if spec.rollback is not None and not 0 < spec.rollback < math.inf:
        fix = 'choose 0.02 for 2 % above the trend, or "none"'
        yield _problem("rollback", f"{spec.rollback} is not finite and above 0", fix=fix)


def _problem(name: str, what: str, *, why: str = "", fix: str = "") -> Problem:
    return Problem(what=what, where=f"low_rank.{name}", why=why, fix=fix)
