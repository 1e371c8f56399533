"""Quorums for learners of unlike speed: rounds that end without the slowest, and what that would save and leave out.

Of the same tokens: a round that is shorter because a learner has not done all of its steps has read less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.cost.predict import predict_all
from meshwright.search.candidate import TIE
from meshwright.search.check import check
from meshwright.search.refine import Entry
from meshwright.search.rules import Scope
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName, Report
from meshwright.spec.units import format_percent, format_seconds

CHOSEN = 0.01  # of the time of as many tokens that a quorum saves before it is chosen, as learners have to
SPOKEN = 0.05  # and before it is spoken of where the job does not allow it
_SCOPES = frozenset({Scope.PLAN, Scope.RUNTIME})


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """The best plan with a quorum, where one is chosen, and in `words` what was weighed."""

    entry: Entry | None
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """A design with a quorum, which takes the share `saved` less time than `whole` for as many tokens and leaves the
    share `left_out` of the sequences out."""

    entry: Entry
    whole: Report
    left_out: float
    saved: float

    @property
    def words(self) -> str:
        rounds = self.entry[0].plan.gradients.rounds
        seconds, whole = format_seconds(self.entry[1].step_seconds), format_seconds(self.whole.step_seconds)
        ends = f"{rounds.quorum} of {self.entry[0].plan.learners} learners end"
        return (
            f"rounds that {ends}, with {rounds.grace_seconds:g} s for the others, take {seconds} a step, not {whole}, "
            f"and leave {format_percent(self.left_out)} of the sequences out: {format_percent(self.saved)} less time "
            "for as many tokens; whoever is slow counts for less, and what that costs in quality has to be measured"
        )


def with_quorum(ranked: Sequence[Entry], job: JobSpec) -> Called:
    """Of the best plans, `ranked`, the one that a quorum makes fastest, where the job allows what it leaves out.

    It takes the place of the best one where it needs less time for as many tokens.
    """
    most, (best, report) = job.synchronize.most_left_out, ranked[0]
    found = [one for entry in ranked for one in offers(*entry) if one.left_out <= most]
    if not found:
        return Called(entry=None, words=f"no quorum saves time and leaves out at most {format_percent(most)}")
    chosen = _best(found)
    if not _tokenwise(chosen.entry[1]) < (1.0 - CHOSEN) * _tokenwise(report):
        words = f"no quorum is chosen: {best.plan.describe()} is as fast with all learners"
        return Called(entry=None, words=words)
    return Called(entry=chosen.entry, words=f"{chosen.words}; job.synchronize.most_left_out allows it")


def advise_quorum(design: Design, report: Report) -> tuple[str, ...]:
    """One line where learners wait for slower ones, the job does not allow a quorum, and one would save time."""
    asked = design.job.synchronize
    if asked.quorum or asked.most_left_out:
        return ()
    made = list(offers(design, report))
    if not made or (found := _best(made)).saved < SPOKEN:
        return ()
    share = math.ceil(1000.0 * found.left_out) / 1000.0
    return (f"{found.words}; the job waits for all, and would not with --set job.synchronize.most_left_out={share:g}",)


def offers(design: Design, report: Report) -> Iterator[_Offer]:
    """Every quorum of fewer than all learners of `design`, which waits for all, that saves time; none where learners
    are alike, or do not wait."""
    plan = design.plan
    rounds = plan.gradients.rounds
    if plan.learners == 1 or not plan.gradients.kind.waits or rounds.quorum or not _unlike(design):
        return
    line = report.step.find(LineName.OUTER)
    grace = _rounded(report.step_seconds - (0.0 if line is None else line.seconds))
    made, refused = list[Design](), set(check(design, scopes=_SCOPES))
    for quorum in range(1, plan.learners):
        gradients = replace(plan.gradients, rounds=replace(rounds, quorum=quorum, grace_seconds=grace))
        one = replace(design, plan=replace(plan, gradients=gradients))
        if not set(check(one, scopes=_SCOPES)) - refused:
            made.append(one)
    for one, found in zip(made, predict_all(made), strict=True):
        saved = 1.0 - _tokenwise(found) / _tokenwise(report)
        if saved > 0.0:
            left_out = 1.0 - found.tokens_per_step / report.tokens_per_step
            yield _Offer(entry=(one, found), whole=report, left_out=left_out, saved=saved)


def _best(found: Sequence[_Offer]) -> _Offer:
    """The fastest, and of those as fast as it the one that waits for most learners."""
    least = min(_tokenwise(one.entry[1]) for one in found)
    as_fast = [one for one in found if _tokenwise(one.entry[1]) <= (1.0 + TIE) * least]
    return max(as_fast, key=lambda one: one.entry[0].plan.gradients.rounds.quorum)


def _unlike(design: Design) -> bool:
    """Whether devices are of several kinds."""
    nodes = [replace(group, name="", site="", num_nodes=1) for group in design.cluster.groups]
    return any(node != nodes[0] for node in nodes)


def _tokenwise(report: Report) -> float:
    """Seconds of a step over the tokens that it reads."""
    return report.step_seconds / report.tokens_per_step


def _rounded(seconds: float) -> float:
    """No less than `seconds`, in two digits: what a person would write for a step of the slowest."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.ceil(seconds / unit) * unit:.2g}")
