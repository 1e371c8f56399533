"""Published runs replayed: every row of a file predicted with nothing fitted, and scored source by source."""

from meshwright.replay.runs import Run, read_runs
from meshwright.replay.scores import OutOfMemory, Scores
from meshwright.replay.validate import Replayed, Validation, validate, write_predictions

__all__ = ["OutOfMemory", "Replayed", "Run", "Scores", "Validation", "read_runs", "validate", "write_predictions"]
