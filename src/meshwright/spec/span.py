"""Spans: who did what, when. The simulator predicts them and a run records them, under the names of report lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`seconds` of `name` (a LineName) from `start`, on pipeline rank or worker `rank`; -1 where not in a pipeline."""

    name: str
    rank: int
    start: float
    seconds: float
    stage: int = -1
    microbatch: int = -1
    step: int = -1


class Recorder(Protocol):
    """Anything that takes finished spans; the runtime is handed one and never asks where they go."""

    def record(self, name: str, start: float, seconds: float, *, stage: int = -1, microbatch: int = -1) -> None:
        """Keep one span that began at `start` on time.perf_counter()'s clock."""


class Silent:
    """The recorder that keeps nothing."""

    def record(self, name: str, start: float, seconds: float, *, stage: int = -1, microbatch: int = -1) -> None:
        return None
