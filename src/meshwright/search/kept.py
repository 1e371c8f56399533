"""The decision kept beside its design, so that whoever is given the design finds what it was chosen from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.catalog.documents import Document, located, read
from meshwright.catalog.jobs import AGAIN
from meshwright.catalog.kinds import sort_of
from meshwright.catalog.migrations import migrate
from meshwright.catalog.ranges import checked_design
from meshwright.search.candidate import Decision
from meshwright.search.check import check_answer
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design, Plan

COUNTS = ("considered", "priced", "fitting", "refined", "seconds")


def decision_path(design: Path) -> Path:
    """`plan.decision.json` for the design `plan.json`; `RUN/decision.json` for a run directory."""
    return design / "decision.json" if design.is_dir() else design.with_suffix(".decision.json")


def is_decision(document: Document) -> bool:
    """Whether `document` looks like what `plan --json` prints, with explanations or without, and not like a design."""
    found = sort_of(document.values)
    return found is not None and found.kind in ("Decision", "Explained")


def read_decision(design: Path, *, plan: Plan) -> Decision | None:
    """The decision that chose `plan`, beside the design at `design`.

    None when there is none or it is of another plan, which a design written over it later leaves behind. Raises
    ConfigError with every problem of the file, whatever plan it is of.
    """
    path = decision_path(design)
    if not path.is_file():
        return None
    try:
        found = decision_of(read(path))
    except ConfigError as error:
        fix = f"{AGAIN}, or delete this file"
        problems = (
            replace(problem, fix=fix if problem.fix in ("", AGAIN) else problem.fix) for problem in error.problems
        )
        raise ConfigError(problems) from None
    return found if found.design.plan == plan else None


def decision_of(document: Document) -> Decision:
    """The decision that `document` holds, as a hand may have left it.

    Raises ConfigError with every problem, its line and what to do: of a key or a number that no decision has, and of
    plans that break a rule.
    """
    found = sort_of(document.values)
    wrapped = found is not None and found.kind == "Explained"
    values, before = (document.values["decision"], "decision") if wrapped else (document.values, "")

    def build() -> Decision:
        try:
            if isinstance(values, dict):
                return _checked(codec.decode(Decision, migrate(values, kind="Decision")))
            return codec.decode(Decision, values)
        except ConfigError as error:
            raise ConfigError(
                replace(problem, where=_under(before, problem.where), fix=problem.fix or AGAIN)
                for problem in error.problems
            ) from None

    return located(build, document, root="Decision")


def _under(before: str, path: str) -> str:
    path = "" if path == "Decision" else path
    return f"{before}.{path}".strip(".")


def _checked(found: Decision) -> Decision:
    """The decision itself. Raises ConfigError for numbers that are none and plans that are not legal."""
    counts = {name: getattr(found, name) for name in COUNTS}
    problems = [*_odd_numbers(codec.encode(found), "")]
    problems += [Problem(where=name, what=f"{count} is below 0") for name, count in counts.items() if count < 0]
    if not found.ranked:
        problems.append(Problem(where="ranked", what="is empty"))
    if not problems:
        problems += _broken(found.design, "design.")
    if not problems:
        for name, entries in (("ranked", found.ranked), ("front", found.front)):
            for index, entry in enumerate(entries):
                problems += _broken(replace(found.design, plan=entry.plan), f"{name}[{index}].")
    if problems:
        raise ConfigError(problems)
    return found


def _broken(design: Design, before: str) -> tuple[Problem, ...]:
    """What the design, or the plan in its place, cannot be: numbers first, then rules."""
    try:
        found = check_answer(checked_design(design))
    except ConfigError as error:
        found = error.problems
    return tuple(replace(problem, where=f"{before}{problem.where}") for problem in found)


def _odd_numbers(value: Any, path: str) -> Iterator[Problem]:
    """Numbers of a JSON value that are not finite."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _odd_numbers(item, f"{path}.{name}".strip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _odd_numbers(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(where=path, what=f"expected a number, got {value}")
