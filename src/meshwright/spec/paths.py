"""Paths as people write them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

_ALIKE = 0.6  # of the letters of two names, from which one may be meant by the other


def expanded(path: str | Path) -> Path:
    """`path` with `~` as the home that it names; as it is where it names nobody's."""
    return Path(os.path.expanduser(path))


def near_names(name: str, among: Iterable[str]) -> list[str]:
    """At most three of the file names `among`, the nearest first, that `name` may be meant to be: what stands before
    their endings is alike, as most files of a folder end alike."""
    stem = Path(name).stem.lower()
    alike = {other: difflib.SequenceMatcher(None, stem, Path(other).stem.lower()).ratio() for other in among}
    near = [other for other in alike if alike[other] >= _ALIKE]
    return sorted(near, key=lambda other: (-alike[other], Path(other).suffix != Path(name).suffix, other))[:3]
