"""Learners that train apart and meet in rounds. Start with sync.py."""

from meshwright.parallel.outer.learners import Learners, build_learners
from meshwright.parallel.outer.roll import Round
from meshwright.parallel.outer.state import loaded, remembered, saved, state_of
from meshwright.parallel.outer.sync import Met, OuterSync, build_outer_sync

__all__ = [
    "Learners",
    "Met",
    "OuterSync",
    "Round",
    "build_learners",
    "build_outer_sync",
    "loaded",
    "remembered",
    "saved",
    "state_of",
]
