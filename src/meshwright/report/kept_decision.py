"""A decision read from a file, where a hand may have been: what a page shows of it is looked at before it is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from meshwright.catalog.ranges import checked_design
from meshwright.search import Decision, Scope, check
from meshwright.search.product import Rejection
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design, Plan

_KINDS: Mapping[str, Any] = {
    "rejected": tuple[Rejection, ...],
    "why": tuple[str, ...],
    "considered": int,
    "priced": int,
    "fitting": int,
    "seconds": float,
}
_FIX = "delete it, or write the plan again with meshwright plan --out"


def checked_decision(document: Any, *, design: Design, where: str) -> Mapping[str, Any] | None:
    """The decision's JSON itself, whole or a part of one; None where there is none. Raises ConfigError.

    What it has is of the right kind, and its ranked plans are such as could be of `design`.
    """
    if document is None:
        return None
    if not isinstance(document, Mapping):
        raise ConfigError(Problem(what="expected a table of keys", where=where, fix=_FIX))
    for name, kind in _KINDS.items():
        if document.get(name) is not None:
            codec.decode(kind, document[name], f"{where}, {name}")
    ranked = document.get("ranked") or []
    if not isinstance(ranked, list):
        raise ConfigError(Problem(what="expected a list", where=f"{where}, ranked", fix=_FIX))
    for index, entry in enumerate(ranked):
        _check_entry(entry, design=design, where=f"{where}, ranked[{index}]")
    return document


def _check_entry(entry: Any, *, design: Design, where: str) -> None:
    if not isinstance(entry, Mapping) or "plan" not in entry:
        raise ConfigError(Problem(what="expected a plan and its figures", where=where, fix=_FIX))
    _check_plan(replace(design, plan=codec.decode(Plan, entry["plan"], f"{where}.plan")), where, legal=False)
    for name, value in entry.items():
        figures = value if isinstance(value, list) else [value]
        if name != "plan" and not all(value is None or _is_number(value) for value in figures):
            raise ConfigError(Problem(what=f"expected a number, got {value!r}", where=f"{where}.{name}", fix=_FIX))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def whole_decision(document: Mapping[str, Any] | None, where: str) -> Decision | None:
    """The decision as a value; None where only a part of it was kept. Raises ConfigError, for illegal plans too."""
    needed = {field.name for field in fields(Decision) if field.default is MISSING}
    if not document or not needed <= document.keys():
        return None
    found = codec.decode(Decision, document, where)
    if not found.ranked:
        raise ConfigError(Problem(what="is empty", where=f"{where}, ranked", fix=_FIX))
    _check_plan(found.design, f"{where}, design", legal=True)
    for index, entry in enumerate(found.ranked):
        _check_plan(replace(found.design, plan=entry.plan), f"{where}, ranked[{index}]", legal=True)
    return found


def _check_plan(design: Design, where: str, *, legal: bool) -> None:
    problems: tuple[Problem, ...] = ()
    try:
        checked_design(design)
    except ConfigError as error:
        problems = error.problems
    if not problems and legal:
        problems = check(design, scopes=frozenset({Scope.PLAN}))
    if problems:
        raise ConfigError(replace(problem, where=f"{where}, {problem.where}", fix=_FIX) for problem in problems)
