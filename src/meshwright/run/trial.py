"""Try: a few real steps of plans that the cost model cannot tell apart, each in fresh workers, and the fastest kept."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright import cost, search
from meshwright.run.children import in_children
from meshwright.run.measure_steps import measure_steps
from meshwright.search import Decision
from meshwright.spec.cluster import ClusterSpec, DeviceKind
from meshwright.spec.errors import ConfigError, Problem, WorkerFailed
from meshwright.spec.plan import Design
from meshwright.spec.units import format_seconds

Say = Callable[[str], None]
# Steps of each plan are timed for about so long after two that are not counted, at least three of them.
_SECONDS_EACH = 4.0
_SLACK_SECONDS = 120.0


def check_trial(cluster: ClusterSpec) -> None:
    """Raises ConfigError where plans of this cluster cannot be tried: anywhere but on this machine's processor."""
    if len(cluster.groups) == 1 and cluster.groups[0].device.kind is DeviceKind.CPU and cluster.num_devices <= 64:
        return
    fix = "leave --try out, or try on --cluster local"
    raise ConfigError(Problem(what="plans can be tried on this machine's processor alone", where=cluster.name, fix=fix))


def fastest(decision: Decision, *, tries: int, say: Say) -> Decision:
    """`decision` with the design that was fastest among the `tries` best ranked that can be trained here.

    A plan whose workers fail is told and left out; when all of them fail the decision stays as it is.
    """
    designs = [replace(decision.design, plan=candidate.plan) for candidate in decision.ranked]
    designs = [design for design in designs if not search.check(design, scopes=frozenset({search.Scope.RUNTIME}))]
    timed = _timed(designs[:tries], say=say)
    if not timed:
        return decision
    seconds, design = min(timed, key=_seconds)
    report = cost.predict(design)
    others = ", ".join(
        f"{format_seconds(spent)} {other.plan.describe()}" for spent, other in sorted(timed, key=_seconds)[1:]
    )
    why = f"the fastest of {len(timed)} tried for a few steps: {format_seconds(seconds)} a step"
    why += f", predicted {format_seconds(report.step_seconds)}" + (f"; {others}" if others else "")
    return replace(decision, design=design, report=report, why=(why, *decision.why))


def _timed(designs: Sequence[Design], *, say: Say) -> list[tuple[float, Design]]:
    by_world: dict[int, list[Design]] = defaultdict(list)
    for design in designs:
        by_world[design.plan.world_size].append(design)
    found: list[tuple[float, Design]] = []
    for world, group in by_world.items():
        say(f"trying {len(group)} of the best plans on {world} worker{'s' if world > 1 else ''}")
        found += zip(_steps(group, world=world, say=say), group, strict=False)
    return found


def _steps(designs: Sequence[Design], *, world: int, say: Say) -> list[float]:
    """Seconds of a step of every design; none when a worker failed."""
    budget = _SECONDS_EACH * len(designs)
    expected = sum(10.0 * cost.predict(design).step_seconds for design in designs)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        given = {"world": world, "store": str(Path(folder) / "store"), "designs": designs, "seconds": budget}
        ranks = [given | {"rank": rank} for rank in range(world)]
        try:
            by_rank = in_children(measure_steps, ranks, seconds=budget + expected + _SLACK_SECONDS)
        except WorkerFailed as error:
            say(f"left out: {error}")
            return []
    return [max(seconds) for seconds in zip(*by_rank, strict=True)]


def _seconds(entry: tuple[float, Design]) -> float:
    return entry[0]
