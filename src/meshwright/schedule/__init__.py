"""Pipeline schedules as tables of actions: pure values, no torch."""

from meshwright.schedule.build import bubble_fraction, build, problems, stage_rank
from meshwright.schedule.table import Action, Table, Work, check, in_flight, needs, to_csv

__all__ = [
    "Action",
    "Table",
    "Work",
    "bubble_fraction",
    "build",
    "check",
    "in_flight",
    "needs",
    "problems",
    "stage_rank",
    "to_csv",
]
