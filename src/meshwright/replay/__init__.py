"""Published runs replayed: every row of a file predicted with nothing fitted, and scored source by source."""

from meshwright.replay.published import Replayed, Validation, check_writable, validate, write_predictions
from meshwright.replay.runs import Run, read_runs
from meshwright.replay.scores import OutOfMemory, RegimeScores, Scores

__all__ = [
    "OutOfMemory",
    "RegimeScores",
    "Replayed",
    "Run",
    "Scores",
    "Validation",
    "check_writable",
    "read_runs",
    "validate",
    "write_predictions",
]
