"""Advice can be followed: each value that the fix of a refused plan names is one that the rule accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from meshwright.search import RULES, Scope, check
from meshwright.search.job_rules import check_job
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import Design, Plan, Schedule, ScheduleKind, Sharding
from meshwright.spec.synchronize import GradientSync, Rounds, SynchronizeSpec, SyncKind
from tests.search import search_samples as samples
from tests.search.rule_designs import D, planned, regrouped

DRAWS = 150
SHARDINGS = (Sharding.OPTIMIZER, Sharding.PARAMETERS)
AXES = ((1, 4), (2, 2), (4, 1), (2, 4), (8, 1))
_CUT = re.compile(r"([\d,]+) microbatch(?:es)?(?: of ([\d,]+) sequences?)?(?: and ([\d,]+) empty rows?)?")
_VALUES = re.compile(r"choose ((?:[\d,]+(?:, | or )?)+)(?=$|,)")
_RANGE = re.compile(r"choose (?:from )?(\d+) to (\d+)")
_RULES = {rule.name: rule for rule in RULES}


def sized(random: Random) -> Design:
    """One whose numbers of rows, microbatches and sequences seldom agree."""
    kind = random.choice([ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE, ScheduleKind.INTERLEAVED])
    chunks = 2 if kind is ScheduleKind.INTERLEAVED else 1
    shape = Schedule(kind=kind, microbatches=random.randint(1, 12), chunks=chunks)
    job = samples.job(sequences=random.randint(1, 60))
    entry = D(schedule=shape, microbatch=random.randint(1, 5), asked=job)
    return planned(entry, empty_rows=random.choice([0, 0, 1, 2, 9]))


def shared(random: Random) -> Design:
    """One whose stages are sharded over numbers of ranks of their own."""
    replicate, shard = random.choice(AXES)
    model = samples.model(tied=random.random() < 0.3)
    entry = D(pipeline=2, tensor=1, replicate=replicate, shard=shard, of=model)
    for stage in range(2):
        shards = random.choice([None, 1, 2, 3, 4, 8, 16])
        entry = regrouped(entry, stage, sharding=random.choice(SHARDINGS), shards=shards)
    return entry


def waited(random: Random) -> Design:
    """One whose rounds a quorum ends, or should."""
    learners = random.choice([1, 2, 4])
    kind = random.choice([SyncKind.DILOCO, SyncKind.LOCAL, SyncKind.EAGER, SyncKind.EVERY_STEP])
    quorum, grace = random.choice([0, 0, 1, 2, 4, 5, -1]), random.choice([0.0, 0.0, 2.0, -1.0])
    rounds = Rounds(every=10, delay=10 if kind is SyncKind.EAGER else 0, quorum=quorum, grace_seconds=grace)
    entry = planned(D(replicate=learners, shard=1), gradients=GradientSync(kind=kind, rounds=rounds))
    return replace(entry, job=replace(entry.job, synchronize=SynchronizeSpec(kinds=(SyncKind.DILOCO,))))


@pytest.mark.parametrize("draw", [sized, shared, waited], ids=lambda draw: draw.__name__)
def test_what_a_fix_names_is_accepted(draw: Any) -> None:
    tried = 0
    for seed in range(DRAWS):
        entry = draw(Random(f"{draw.__name__} {seed}"))
        for problem in check(entry, scopes=frozenset({Scope.PLAN})):
            rule = _RULES[re.search(r"rule ([\w-]+)", problem.why)[1]]
            for words, changed in followed(entry, problem):
                tried += 1
                found = rule(changed)
                assert found is None or found.where != problem.where, f"{problem}\nfollowed by {words}\n{found}"
    assert tried > DRAWS // 4


def test_what_a_fix_of_a_quorum_names_is_accepted_of_jobs() -> None:
    tried = 0
    for seed in range(DRAWS):
        random = Random(f"quorum {seed}")
        left_out = random.choice([0.0, 0.1, 1.0])
        quorum, grace = random.choice([0, 1, 7, 8, 9, 1000, -1]), random.choice([0.0, 2.0, -1.0])
        asked = SynchronizeSpec(kinds=(SyncKind.DILOCO,), quorum=quorum, grace_seconds=grace, most_left_out=left_out)
        job = replace(samples.job(), synchronize=asked)
        for problem in _of_job(job):
            for words, changed in _followed_by_job(job, problem):
                tried += 1
                assert problem.where not in {found.where for found in _of_job(changed)}, f"{problem}\n{words}"
    assert tried > DRAWS // 4


def _of_job(job: JobSpec) -> tuple[Problem, ...]:
    try:
        check_job(samples.model(), samples.cluster(), job)
    except ConfigError as error:
        return tuple(problem for problem in error.problems if "rule quorum" in problem.why)
    return ()


def _followed_by_job(job: JobSpec, problem: Problem) -> Iterator[tuple[str, JobSpec]]:
    name, fix = problem.where.rpartition(".")[2], problem.fix
    usual, asked = SynchronizeSpec(), job.synchronize
    for value in _numbers(fix):
        yield f"{name} = {value}", replace(job, synchronize=replace(asked, **{name: type(getattr(usual, name))(value)}))
    if "leave it out" in fix or "leave grace out" in fix:
        gone = {name: getattr(usual, name)}
        gone |= {"grace_seconds": 0.0} if "leave it out and its grace" in fix else {}
        yield "left out", replace(job, synchronize=replace(asked, **gone))
    if "or the quorum" in fix:
        gone = {"quorum": 0} | ({"grace_seconds": 0.0} if "and its grace" in fix else {})
        yield "the quorum left out", replace(job, synchronize=replace(asked, **gone))


def followed(entry: Design, problem: Problem) -> Iterator[tuple[str, Design]]:
    """The design with each choice that the fix of a problem names of numbers, and what was chosen."""
    fix, where = problem.fix, problem.where
    if not where.startswith("plan."):
        return
    if cut := _CUT.search(fix):
        microbatches, size, empty = (None if text is None else _whole(text) for text in cut.groups())
        values = {"plan.schedule.microbatches": microbatches, "plan.microbatch": size, "plan.empty_rows": empty}
        values |= {"plan.empty_rows": 0} if f"{cut[0]} and 0 empty rows" in fix else {}
        yield cut[0], _with(entry, {path: value for path, value in values.items() if value is not None})
        return
    grace = {"plan.gradients.rounds.grace_seconds": 0.0} if "grace of 0" in fix else {}
    if fix == "choose 0 empty rows":
        yield fix, _with(entry, {"plan.empty_rows": 0})
        return
    for value in _numbers(fix):
        yield f"{value}", _with(entry, {where: value, **(grace if value == 0 else {})})
    if most := re.search(r"a quorum of at most (\d+)", fix):
        yield most[0], _with(entry, {"plan.gradients.rounds.quorum": int(most[1])})
    if where.endswith(".shards") and fix.endswith("leave it out"):
        yield "left out", _with(entry, {where: None})


def _numbers(fix: str) -> list[int]:
    if span := _RANGE.search(fix):
        return [int(span[1]), int(span[2]), *([0] if ", or 0" in fix else [])]
    found = _VALUES.match(fix)
    return [] if found is None else [_whole(text) for text in re.findall(r"\d[\d,]*\d|\d", found[1])]


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _with(entry: Design, values: dict[str, Any]) -> Design:
    document = codec.encode(entry.plan)
    for path, value in values.items():
        at: Any = document
        *keys, last = re.findall(r"\w+", path.removeprefix("plan."))
        for key in keys:
            at = at[int(key) if key.isdigit() else key]
        at[last] = value
    return replace(entry, plan=codec.decode(Plan, document, "plan"))
