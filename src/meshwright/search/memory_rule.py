"""The rule of memory: every pipeline rank's peak is within what its device may use."""

from __future__ import annotations

from meshwright import cost
from meshwright.search.rules import Rule, Scope
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design
from meshwright.spec.units import format_bytes


def memory_fits(design: Design) -> Problem | None:
    """The predicted peak of every pipeline rank is at most the capacity of its devices."""
    report = cost.predict(design)
    if report.fits:
        return None
    worst = report.tightest
    largest = max(worst.parts.items(), key=lambda part: part[1])
    return Problem(
        where=f"plan (pipeline rank {worst.rank})",
        what=worst.need,
        why=f"{largest[0]!s} {format_bytes(largest[1])}",
        fix="shard more, recompute more, take a smaller microbatch or more devices",
    )


MEMORY_RULES = (Rule(name="memory-fits", scope=Scope.MEMORY, check=memory_fits),)
