"""One step of a plan as a page carries it: the spans of every pipeline rank, few enough to draw, packed small."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright import cost
from meshwright.schedule import planned
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Design, Plan
from meshwright.spec.report import LineName
from meshwright.spec.span import Span

TICKS = 1_000_000
MOST_ACTIONS = 16_384
_FEWEST_ROUNDS = 2
_TOO_MANY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """Spans of a step of `microbatches` microbatches, `of` being those of the plan: fewer where all are too many."""

    spans: tuple[Span, ...]
    ranks: int
    microbatches: int
    of: int

    @property
    def seconds(self) -> float:
        return max((span.start + span.seconds for span in self.spans), default=0.0)

    @property
    def is_whole(self) -> bool:
        return self.microbatches == self.of


def drawn_step(design: Design) -> DrawnStep | None:
    """The predicted timeline of one step, without what is idle; None where it cannot be played or drawn.

    A step of very many actions is played with fewer microbatches, a multiple of the pipeline ranks: its beginning and
    its end are those of the whole step, of the middle, which repeats itself, less is seen.
    """
    plan = design.plan
    count = shown_microbatches(plan)
    if count == 0:
        return None
    try:
        shorter = replace(plan, schedule=planned.of_first(plan.schedule, count))
        spans = cost.timeline(replace(design, plan=shorter))
    except ConfigError:
        return None
    busy = tuple(span for span in spans if span.name != LineName.BUBBLE and span.seconds > 0.0)
    if not busy:
        return None
    return DrawnStep(spans=busy, ranks=plan.pipeline, microbatches=count, of=plan.schedule.microbatches)


def shown_microbatches(plan: Plan) -> int:
    """How many microbatches are drawn: all, or as many rounds of the pipeline as MOST_ACTIONS hold; 0 for none."""
    each = 2 * len(plan.stages) * plan.schedule.slices
    rounds = max(_FEWEST_ROUNDS, MOST_ACTIONS // (each * plan.pipeline))
    fewer = min(rounds * plan.pipeline, plan.schedule.microbatches)
    if each * fewer > _TOO_MANY * MOST_ACTIONS:
        return 0
    alike = plan.schedule.microbatches <= fewer + plan.pipeline
    return plan.schedule.microbatches if alike else fewer


def packed(step: DrawnStep) -> dict[str, object]:
    """The step as JSON: `kinds` are [name, stage, seconds], `rows` one [kinds, microbatches, starts] a rank.

    Starts are ticks, TICKS to the step, each less the one before it in the row. The rows are JSON, deflated, in
    base64: browsers inflate them by themselves.
    """
    names = list(dict.fromkeys(span.name for span in step.spans))
    kinds: dict[tuple[int, int, float], int] = {}
    scale = TICKS / (step.seconds or 1.0)
    rows = []
    for rank in range(step.ranks):
        row = sorted((span for span in step.spans if span.rank == rank), key=lambda span: span.start)
        starts = [round(span.start * scale) for span in row]
        which = [
            kinds.setdefault((names.index(span.name), span.stage, float(f"{span.seconds:.4g}")), len(kinds))
            for span in row
        ]
        rows.append([which, [span.microbatch for span in row], _steps(starts)])
    text = json.dumps(rows, separators=(",", ":")).encode()
    return {
        "seconds": step.seconds,
        "ticks": TICKS,
        "microbatches": [step.microbatches, step.of],
        "names": names,
        "kinds": [list(kind) for kind in kinds],
        "rows": base64.b64encode(zlib.compress(text, 9)).decode("ascii"),
    }


def _steps(values: Sequence[int]) -> list[int]:
    return [value - before for before, value in zip([0, *values], values, strict=False)]
