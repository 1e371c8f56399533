"""What a person sees of a run while it trains."""

from __future__ import annotations

from enum import StrEnum


class Screen(StrEnum):
    """`quiet`: what rank 0 says goes to RUN/logs like that of other ranks; `verbose`: the launcher's log as well."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"
