"""Names a person types, matched whatever their case and punctuation."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

_PUNCTUATION = re.compile(r"[^a-z0-9.]|(?<!\d)\.|\.(?!\d)")
_EDITION = re.compile(r"[-_ ](instruct|base|chat|hf|it|v0\.\d)$")


def normal(name: str) -> str:
    """`Llama-3.1_8B` as `llama3.18b`: points between digits stay, so that 1.3 and 13 differ."""
    return _PUNCTUATION.sub("", name.lower())


def spellings(name: str) -> tuple[str, ...]:
    """The normal forms under which `name` is looked up: as it is, without its owner, without its edition."""
    short = name.lower().rsplit("/", maxsplit=1)[-1]
    forms = [name, short, short.removeprefix("meta-")]
    while (shorter := _EDITION.sub("", forms[-1])) != forms[-1]:
        forms.append(shorter)
    return tuple(dict.fromkeys(normal(form) for form in forms))


def find(name: str, known: Mapping[str, T]) -> T | None:
    """The entry of `known` (keyed by normal name) that `name` means; None when there is none."""
    return next((known[form] for form in spellings(name) if form in known), None)


def suggest(name: str, known: Iterable[str], *, see: str) -> str:
    """`did you mean 'llama-2-7b' or 'llama-2-70b'?`, or where to see what is known."""
    by_normal = {normal(entry): entry for entry in known}
    forms = spellings(name)
    close = difflib.get_close_matches(forms[-1], by_normal, n=3, cutoff=0.6)
    if not close:
        return f"see {see}"
    return f"did you mean {' or '.join(repr(by_normal[form]) for form in close)}?"
