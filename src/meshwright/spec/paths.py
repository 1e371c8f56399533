"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """`path` with `~` as the home that it names; as it is where it names nobody's."""
    return Path(os.path.expanduser(path))
