"""Cost: seconds and bytes of a plan, or of a table of plans in one vectorised pass; never imports torch."""

from meshwright.cost.costs import Costs
from meshwright.cost.evaluate import evaluate
from meshwright.cost.layout import Layout
from meshwright.cost.predict import predict, predict_all
from meshwright.cost.table import (
    DEFAULT_ORDER,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    PlanTable,
)
from meshwright.cost.timeline import timeline
from meshwright.cost.traffic import Traffic, traffic

__all__ = [
    "DEFAULT_ORDER",
    "PRECISIONS",
    "RECOMPUTES",
    "SCHEDULES",
    "SHARDINGS",
    "Costs",
    "Layout",
    "PlanTable",
    "Traffic",
    "evaluate",
    "predict",
    "predict_all",
    "timeline",
    "traffic",
]
