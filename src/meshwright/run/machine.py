"""Where this machine keeps what it has learnt and prepared; the machine itself is the catalog's to describe."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.catalog.machine import Machine, installed, this_machine
from meshwright.spec.paths import expanded

__all__ = ["Machine", "cache_root", "installed", "this_machine"]


def cache_root() -> Path:
    """Where calibrations and prepared data are kept: MESHWRIGHT_CACHE, else XDG_CACHE_HOME, else ~/.cache."""
    own = os.environ.get("MESHWRIGHT_CACHE")
    if own:
        return expanded(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"
