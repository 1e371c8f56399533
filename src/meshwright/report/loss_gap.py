"""The price in quality: how far the validation loss of a run lies above that of one whose ranks meet in every step,
after as many tokens and after as long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshwright.catalog import load_design
from meshwright.report.run_files import Row, RunFiles, read_run
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Design
from meshwright.spec.units import format_count, format_seconds

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGap:
    """Validation loss of `run` less that of `reference`, in nats a token.

    After `tokens`, the most that both were evaluated at, and after `seconds` of steps, the longest that both trained;
    evaluations before and after are joined by a line. `at_seconds` is None where their steps have no time in common.
    """

    run: str
    reference: str
    tokens: float
    at_tokens: float
    seconds: float
    at_seconds: float | None

    @property
    def words(self) -> str:
        """`0.074 nats above it after 123 K tokens, and 1.090 nats below it after 51.1 s of steps`."""
        first = f"{_signed(self.at_tokens)} it after {format_count(self.tokens)} tokens"
        if self.at_seconds is None:
            return first
        return f"{first}, and {_signed(self.at_seconds)} it after {format_seconds(self.seconds)} of steps"


def loss_gap(run: RunFiles, reference: RunFiles) -> LossGap | None:
    """How far `run` lies above `reference`; None where they have no evaluation at tokens that both reached, or are of
    unlike text, whose losses mean different things."""
    if run.design.job.data != reference.design.job.data:
        return None
    ours, theirs = _by_tokens(run), _by_tokens(reference)
    common = _common(ours, theirs)
    if common is None:
        return None
    timed = _by_seconds(run), _by_seconds(reference)
    meant = _common(*timed)
    return LossGap(
        run=run.name,
        reference=reference.name,
        tokens=common,
        at_tokens=_at(ours, common) - _at(theirs, common),
        seconds=meant or 0.0,
        at_seconds=None if meant is None else _at(timed[0], meant) - _at(timed[1], meant),
    )


def twin(run: RunFiles) -> RunFiles | None:
    """The run in the same folder that learns the same from the same text with the same batches, and whose ranks meet
    whole in every step: of several one of the same seed, and the one that was evaluated furthest. None without one, or
    where `run` itself is such a run."""
    if not meets_otherwise(run.design) or run.is_plan:
        return None
    evaluated = [each for each in _beside(run) if each.evaluations]
    seed = run.design.job.seed
    return max(evaluated, key=lambda each: (each.design.job.seed == seed, each.evaluations[-1]["tokens"]), default=None)


def _beside(run: RunFiles) -> Iterator[RunFiles]:
    """Runs in the same folder that learn the same and meet whole in every step; what cannot be read is none."""
    for place in sorted(run.path.resolve().parent.glob("*/design.json")):
        with suppress(ConfigError):
            design = load_design(place)
            if not meets_otherwise(design) and _learns(design) == _learns(run.design):
                yield read_run(place.parent)


def meets_otherwise(design: Design) -> bool:
    """Whether the ranks of the plan are learners, or compress what they send."""
    return design.plan.learners > 1 or design.plan.gradients.compression is not None


def _learns(design: Design) -> tuple[object, ...]:
    """What two runs share that differ in how their ranks are laid out and meet, and in nothing that is learned."""
    job = design.job
    batches = (job.data, job.sequence_length, job.batch_tokens, job.total_tokens)
    return design.model, *batches, job.optimizer, job.learning_rate, job.z_loss, job.precision, job.low_rank, job.start


def _by_tokens(run: RunFiles) -> Points:
    rows = _last_of(run.evaluations, "tokens", "validation_loss")
    return [(float(row["tokens"]), float(row["validation_loss"])) for row in rows]


def _by_seconds(run: RunFiles) -> Points:
    """Validation loss by the time that steps took until then."""
    steps = _last_of(run.steps, "seconds")
    spent = dict(zip((row["step"] for row in steps), accumulate(row["seconds"] for row in steps), strict=True))
    rows = _last_of(run.evaluations, "validation_loss")
    return [(spent[row["step"]], float(row["validation_loss"])) for row in rows if row["step"] in spent]


def _last_of(rows: Sequence[Row], *names: str) -> list[Row]:
    """Of every step the row that was written last and has numbers of those names, in order: a run that went back writes
    a step again, and one whose loss was not finite has no number for it."""
    told = [row for row in rows if all(isinstance(row.get(name), int | float) for name in names)]
    return [row for _, row in sorted({row["step"]: row for row in told}.items())]


def _common(one: Points, other: Points) -> float | None:
    """The furthest that both curves reach and began before."""
    if not one or not other:
        return None
    reached = min(one[-1][0], other[-1][0])
    return reached if reached >= max(one[0][0], other[0][0]) else None


def _at(points: Points, place: float) -> float:
    """The curve at `place`, which lies between its ends."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= place <= x1:
            return y0 + (y1 - y0) * (place - x0) / (x1 - x0)
    return points[0][1] if place <= points[0][0] else points[-1][1]


def _signed(nats: float) -> str:
    """`0.074 nats above`; what rounds to none is above."""
    nats = round(nats, 3)
    return f"{abs(nats):.3f} nats {'above' if nats >= 0 else 'below'}"
