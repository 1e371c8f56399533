"""What the search hands back: candidates by their figures, and the decision with all that explains it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshwright.search.product import Rejection
from meshwright.search.worth import worth
from meshwright.spec.errors import Problem
from meshwright.spec.job import Objective
from meshwright.spec.plan import Design, Plan
from meshwright.spec.report import LineName, Report

ORDERED_BY: Mapping[Objective, str] = MappingProxyType(
    {
        Objective.TIME: "the step that 19 of 20 stay under, over the chance that it fits",
        Objective.COST: "the step that 19 of 20 stay under, over the chance that it fits, times the devices it uses",
        Objective.MEMORY: "the memory at the peak, and of equals by the step that 19 of 20 stay under",
    }
)
_TO_THE_SAME_LOSS = ", times the steps that it takes to the same loss"  # of learners, and of compressed gradients
LEAST_LIKELY = 1e-3  # to fit, that a step is divided by
TIE = 0.0005  # of the step: two plans nearer than this are as good
COMMUNICATION = (
    LineName.TENSOR,
    LineName.CONTEXT,
    LineName.EXPERTS,
    LineName.TRANSFER,
    LineName.GRADIENTS,
    LineName.PARAMETERS,
    LineName.OUTER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One ranked plan by its figures.

    Shares are of the step; nine of ten measured steps lie in `error_band`, multiples of it. `expected_seconds` is the
    step that 19 of 20 stay under, over the probability of fitting: what plans are ranked by. `peak_bytes` and
    `capacity_bytes` are of the pipeline rank with least room left. `total_seconds`, `total_cost` (dollars) and
    `total_kilowatt_hours` reach the job's token target with the failures on the way, of which `goodput` is the useful
    share of time; those of a billion tokens likewise. None where prices, watts or failure rates are not known.
    """

    plan: Plan
    step_seconds: float
    error_band: tuple[float, float]
    tokens_per_second: float
    mfu: float | None
    peak_bytes: float
    capacity_bytes: float
    bubble_share: float
    communication_share: float
    total_seconds: float
    total_cost: float | None
    fit_probability: float | None = None
    expected_seconds: float | None = None
    goodput: float | None = None
    total_kilowatt_hours: float | None = None
    dollars_per_billion: float | None = None
    kilowatt_hours_per_billion: float | None = None

    @property
    def free_bytes(self) -> float:
        return self.capacity_bytes - self.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The design chosen, its report, the best plans in order and why.

    Of `considered` legal plans `priced` were priced, of which `fitting` fit; the others cannot be better. `seconds` is
    the time the search took. The `refined` most promising were laid out again; where not `settled`, others that were
    not promise as much as those ranked last. No plan of `front` is beaten in time, memory and devices at once by one
    that was priced. Problems in `predicts_only` are why this runtime cannot train the design yet; () when it can.
    `ordered_by` says by what plans are ranked. All are such as `trainer`, another one, has words for; None where none
    was named. `asked` and `defaults` are fields of the job that were set and that were left, with their values as a
    person reads them; both empty where that is not known.
    """

    design: Design
    report: Report
    ranked: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    why: tuple[str, ...]
    considered: int
    priced: int
    fitting: int
    seconds: float
    front: tuple[Candidate, ...] = ()
    predicts_only: tuple[Problem, ...] = ()
    ordered_by: str = ""
    trainer: str | None = None
    asked: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    refined: int = 0
    settled: bool = True
    schema: int = 1


def ordered_by(designs: Iterable[Design]) -> str:
    """By what plans like these, which answer one job, are ranked, in words."""
    found = tuple(designs)
    objective = found[0].job.objective
    more = any(worth(design.plan, parameters=design.model.parameters) != 1.0 for design in found)
    return ORDERED_BY[objective] + (_TO_THE_SAME_LOSS if more and objective is not Objective.MEMORY else "")


def expected_seconds(design: Design, report: Report) -> float:
    """The step at the cautious end of its interval, which 19 of 20 stay under, over the probability of fitting: a plan
    that fits half the time is tried, and given up, as often as it runs. Learners' counts for more, and that of
    compressed gradients, as they take more steps to the same loss (`worth`)."""
    times = worth(design.plan, parameters=design.model.parameters)
    upper = report.step_seconds * report.error_band[1] * times
    return upper / max(1.0 if report.fit_probability is None else report.fit_probability, LEAST_LIKELY)


def candidate(design: Design, report: Report) -> Candidate:
    """The figures of the plan of `design` that a ranked table shows."""
    tightest = report.fullest
    whole = report.outlook
    return Candidate(
        plan=design.plan,
        step_seconds=report.step_seconds,
        error_band=report.error_band,
        tokens_per_second=report.tokens_per_second,
        mfu=report.mfu,
        peak_bytes=tightest.total,
        capacity_bytes=tightest.capacity,
        bubble_share=report.share(LineName.BUBBLE),
        communication_share=report.share(*COMMUNICATION),
        total_seconds=whole.seconds if whole else report.total_seconds,
        total_cost=report.total_cost,
        fit_probability=report.fit_probability,
        expected_seconds=expected_seconds(design, report),
        goodput=whole.goodput if whole else None,
        total_kilowatt_hours=whole.kilowatt_hours if whole else None,
        dollars_per_billion=whole.dollars_per_billion if whole else None,
        kilowatt_hours_per_billion=whole.kilowatt_hours_per_billion if whole else None,
    )
