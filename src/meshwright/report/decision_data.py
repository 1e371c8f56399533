"""The figures of every ranked plan as JSON, for the scripts of the page: settings, lines, memory, one step drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from meshwright.report.drawn_step import DrawnStep, packed
from meshwright.report.settings import settings
from meshwright.report.waterfall import waterfall
from meshwright.spec.errors import controls_spelt
from meshwright.spec.plan import Design, Plan
from meshwright.spec.report import Report


def plan_data(design: Design, report: Report, step: DrawnStep | None) -> dict[str, Any]:
    """One plan: its `terms` sum to `step_seconds`, `memory` is of the rank whose device has least room left."""
    tightest = report.fullest
    return {
        "digest": design.plan.digest(),
        "name": design.plan.describe(),
        "step_seconds": report.step_seconds,
        "error_band": list(report.error_band),
        "tokens_per_second": report.tokens_per_second,
        "mfu": report.mfu,
        "settings": [list(pair) for pair in settings(design)],
        "terms": [[bar.name, bar.seconds] for bar in waterfall(report).bars],
        "memory": {
            "rank": tightest.rank,
            "capacity": tightest.capacity,
            "parts": [[name, count] for name, count in tightest.parts.items() if count > 0.0],
        },
        "row_name": row_name(design.plan),
        "timeline": packed(step) if step else None,
    }


def row_name(plan: Plan) -> str:
    return "rank" if plan.pipeline > 1 else "device"


def document(plans: Sequence[dict[str, Any]], *, chosen: int) -> str:
    """The JSON text, safe inside a script element."""
    told = _spelt({"chosen": chosen, "plans": list(plans)})
    text = json.dumps(told, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _spelt(value: Any) -> Any:
    """`value` whose texts have their control characters spelt out, which JSON would hide from the page's own text."""
    if isinstance(value, str):
        return controls_spelt(value)
    if isinstance(value, dict):
        return {key: _spelt(each) for key, each in value.items()}
    return [_spelt(each) for each in value] if isinstance(value, (list, tuple)) else value
