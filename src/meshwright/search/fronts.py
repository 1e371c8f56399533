"""The fronts of a decision: plans among those priced that none beats in time, memory and devices at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.search.candidate import Candidate, candidate
from meshwright.search.explore import Explorer
from meshwright.search.pareto import pareto
from meshwright.search.refine import Entry, priced

FRONT = 8  # plans of the front that are shown


def front(found: Explorer) -> list[Entry]:
    """Plans among those priced that none beats in time, memory and devices at once, the fastest first, at most FRONT.

    Price and energy are devices times time, so that a plan that is least in either is among them. Of many, those that
    lie evenly between the fastest and the one that holds least.
    """
    table, prices = found.table, found.prices
    fastest = float(np.min(prices.upper_seconds[prices.fits & prices.finite]))
    near = prices.upper_seconds <= found.job.constraints.slowdown * fastest
    usable = prices.fits & prices.finite & near
    mask = pareto(prices.upper_seconds, prices.memory_bytes, table.world.astype(np.float64), usable=usable)
    rows = np.flatnonzero(mask)
    rows = rows[np.lexsort((prices.memory_bytes[rows], prices.upper_seconds[rows]))]
    picked = rows[np.unique(np.linspace(0, len(rows) - 1, min(FRONT, len(rows))).round().astype(np.int64))]
    return priced(
        [table.take([row]) for row in picked.tolist()], model=found.model, cluster=found.cluster, job=found.job
    )


def joint(fronts: Sequence[Sequence[Entry]]) -> tuple[Candidate, ...]:
    """Of fronts of machines in several orders what none of them beats, the fastest first."""
    found = [candidate(made, report) for entries in fronts for made, report in entries]
    if len(fronts) == 1:
        return tuple(found)
    upper = np.array([entry.step_seconds * entry.error_band[1] for entry in found])
    held = np.array([entry.peak_bytes for entry in found])
    mask = pareto(upper, held, np.array([float(entry.plan.world_size) for entry in found]))
    return tuple(found[row] for row in np.argsort(upper, kind="stable") if mask[row])[:FRONT]
