"""Rest: what a file of a trainer says beyond a plan's meaning, compared word for word with what is exported."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from meshwright.export.compare import Line, Verdict
from meshwright.export.meaning import Meaning

_ABSENT = "not given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a reader makes of a file: its meaning, and by name what the file says that is not part of it."""

    meaning: Meaning
    rest: Mapping[str, str]


def without(rest: Mapping[str, str], idle: Mapping[str, str]) -> dict[str, str]:
    """`rest` without the names that one of the patterns in `idle` matches, which change nothing that is trained."""
    return {name: value for name, value in rest.items() if not any(fnmatchcase(name, pattern) for pattern in idle)}


def compare_rest(
    wanted: Mapping[str, str] | None, found: Mapping[str, str], *, ways: Collection[str]
) -> Iterator[Line]:
    """A line for every setting that either has. Where nothing can be `wanted`, those of `ways`, by which a trainer does
    the same otherwise, are left out."""
    expected: Mapping[str, str] = wanted or {}
    for name in dict.fromkeys([*expected, *found]):
        if wanted is None and name in ways:
            continue
        here, there = _said(expected, name), _said(found, name)
        verdict = Verdict.KEPT if _same(here, there) else Verdict.DIFFERS
        yield Line(name=name, plan=here, peer=there, verdict=verdict)


def _said(settings: Mapping[str, str], name: str) -> str:
    return (settings[name] or "given") if name in settings else _ABSENT


def _same(here: str, there: str) -> bool:
    """Equal as words or as numbers."""
    if here == there:
        return True
    try:
        return float(here) == float(there)
    except ValueError:
        return False
