"""Line by line: what the plan says against what the peer's flags were read back as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from meshwright.export.meaning import Meaning, Sizes, Steps
from meshwright.spec.stage_words import stage_words


class Verdict(StrEnum):
    """`kept`: read back equal. `lost`: no flag of the peer says it, and it goes its own way. `differs`: read back as
    something else, so the flags are not this plan."""

    KEPT = "kept"
    LOST = "lost"
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that a plan says, what the peer makes of it, and whether they are the same."""

    name: str
    plan: str
    peer: str
    verdict: Verdict


def compare(wanted: Meaning, found: Meaning, *, nearest: Meaning) -> tuple[Line, ...]:
    """A line for every field of a meaning, those of the model and the optimizer by their own names.

    `nearest` is what comes nearest to `wanted` in the peer's words: where these are not the plan's, the plan is lost.
    """
    return tuple(_lines("", wanted, found, nearest))


def _lines(prefix: str, wanted: Any, found: Any, nearest: Any) -> Iterator[Line]:
    for field in fields(wanted):
        here, there, near = (getattr(each, field.name) for each in (wanted, found, nearest))
        name = f"{prefix}{field.name.replace('_', ' ')}"
        if isinstance(here, (Sizes, Steps)):
            yield from _lines(f"{name}: ", here, there, near)
        else:
            verdict = Verdict.KEPT if here == there else Verdict.LOST if there == near else Verdict.DIFFERS
            words = stage_words if field.name == "stages" else _words
            yield Line(name=name, plan=words(here), peer=words(there), verdict=verdict)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value == ():
        return "none"
    if isinstance(value, tuple):
        return _runs(tuple(_words(entry) for entry in value))
    return "none" if value is None else str(value)


def _runs(words: tuple[str, ...]) -> str:
    """`full x 32` for a run of equal words."""
    found: list[tuple[str, int]] = []
    for word in words:
        if found and found[-1][0] == word and not word.isdigit():
            found[-1] = (word, found[-1][1] + 1)
        else:
            found.append((word, 1))
    texts = [word if count == 1 else f"{word} x {count}" for word, count in found]
    return f"({', '.join(texts)})" if len(texts) != 1 else texts[0]
