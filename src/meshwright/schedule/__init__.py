"""Pipeline schedules as data: pure values, no torch."""

from meshwright.schedule.bubble import bubble_fraction
from meshwright.schedule.build import NAMED, build, placement, problems, program, stage_rank
from meshwright.schedule.check import check
from meshwright.schedule.graph import Graph, graph
from meshwright.schedule.program import Program
from meshwright.schedule.table import Action, Table, Work, in_flight, needs, to_csv

__all__ = [
    "NAMED",
    "Action",
    "Graph",
    "Program",
    "Table",
    "Work",
    "bubble_fraction",
    "build",
    "check",
    "graph",
    "in_flight",
    "needs",
    "placement",
    "problems",
    "program",
    "stage_rank",
    "to_csv",
]
