"""Cost: seconds and bytes of a plan, or of a table of plans in one vectorised pass; never imports torch."""

from meshwright.cost.table import (
    DEFAULT_ORDER,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    Layout,
    PlanTable,
)

__all__ = ["DEFAULT_ORDER", "PRECISIONS", "RECOMPUTES", "SCHEDULES", "SHARDINGS", "Layout", "PlanTable"]
