"""Settings as a person writes them (`tp=4,pp=2`), read into columns of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.search.constraints import COLUMNS, Value, columns_of, limits
from meshwright.search.meetings import meeting_words
from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import OTHER_NAMES, Constraints, full_name
from meshwright.spec.placement_words import placement_words
from meshwright.spec.plan import Plan, Recompute

WHERE = "--why"


def read_settings(text: str | Mapping[str, Value]) -> dict[str, Value]:
    """Columns and values that `text` (`tp=4,pp=2`, or a mapping of such names) asks for.

    Names are the columns of job.constraints.fix or short ones. Raises ConfigError with every name and value that is
    not known, every contradiction, and a column that is named twice.
    """
    problems: list[Problem] = []
    found: dict[str, Value] = {}
    for name, value in _pairs(text, problems):
        column = full_name(name)
        if column not in COLUMNS:
            what = f"{name!r} is not a setting of a plan"
            known = [*COLUMNS, *OTHER_NAMES]
            problems.append(Problem(where=f"{WHERE} {name}", what=what, fix=nearest(name.lower(), known)))
        elif column in found:
            problems.append(Problem(where=f"{WHERE} {name}", what=f"{column} is named twice", fix="name it once"))
        else:
            found[column] = value
    read: Mapping[str, Value] = {}
    try:
        read = limits(Constraints(fix=found)).fixed
    except ConfigError as error:
        names = "job.constraints.fix."
        problems += [replace(problem, where=problem.where.replace(names, f"{WHERE} ")) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return dict(read)


def _pairs(text: str | Mapping[str, Value], problems: list[Problem]) -> list[tuple[str, Value]]:
    if isinstance(text, Mapping):
        return [(str(name), value) for name, value in text.items()]
    pairs: list[tuple[str, Value]] = []
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            fix = "write settings as tp=4,pp=2"
            problems.append(Problem(where=WHERE, what=f"{part.strip()!r} is not name=value", fix=fix))
            continue
        pairs.append((name, value))
    return pairs


def words(settings: Mapping[str, Value]) -> str:
    """`tensor 4, pipeline 2, no recompute`."""
    return ", ".join(word(column, value) for column, value in settings.items()) or "the same settings"


def word(column: str, value: Value) -> str:
    if column == "recompute":
        return f"{'no' if value == 'none' else value} recompute"
    if column == "zero":
        return "no sharding" if value == "none" else str(value)
    if column == "offload":
        return "nothing offloaded" if value == "none" else f"{value} offloaded"
    if column in ("schedule", "precision", "exchange"):
        return str(value)
    if column == "token_layout":
        return f"{value} tokens"
    if column == "sync":
        return meeting_words(str(value), whole="replicas that meet in every step")
    if column == "sequence_parallel":
        return "sequence parallel" if value == "on" else "no sequence parallel"
    return f"{column.replace('_', ' ')} {value}"


def differing(one: Plan, other: Plan) -> dict[str, tuple[Value, Value]]:
    """Columns in which two plans differ, with the values of both. What follows from another column is left out.

    The data axis is told by replicate and shard, which follow from the rest where the plans use different numbers of
    devices; without a grid of experts or a context axis, their columns say nothing. Where the first blocks are alike,
    `recomputed blocks` tells plans apart that compute a different number of them again. `order of axes` and `order
    of devices` tell apart plans that are laid differently.
    """
    ours, theirs = columns_of(one), columns_of(other)
    skipped = {"data", "devices"} if one.world_size == other.world_size else {"data", "replicate", "shard"}
    if one.experts is None and other.experts is None:
        skipped |= {"expert", "expert_tensor"}
    if one.context == other.context == 1:
        skipped |= {"inner", "exchange", "token_layout"}
    pairs = {column: (ours[column], theirs[column]) for column in ours if column in theirs and column not in skipped}
    pairs["recomputed blocks"] = _recomputed(one), _recomputed(other)
    pairs["order of axes"] = _axes(one), _axes(other)
    pairs["order of devices"] = devices_words(one), devices_words(other)
    if pairs["recompute"][0] != pairs["recompute"][1]:
        del pairs["recomputed blocks"]
    return {column: pair for column, pair in pairs.items() if pair[0] != pair[1]}


def _axes(plan: Plan) -> str:
    """The axes of more than one rank, outermost first, where they are not in the usual order."""
    return "usual" if plan.has_usual_order else " ".join(axis.name.value for axis in plan.axes if axis.size > 1)


def devices_words(plan: Plan) -> str:
    """`as listed`, or the devices in the order of the ranks: `16 to 31, 0 to 15`."""
    return placement_words(plan.placement) if plan.placement and plan.is_placed else "as listed"


def _recomputed(plan: Plan) -> int:
    """Blocks whose activations are computed again, in whole or in part: they may differ from those of the first."""
    return sum(group.stop - group.start for group in plan.groups if group.recompute is not Recompute.NONE)
