"""How the data parallel ranks of a plan meet: over which links, at what cost, and what other ways would take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.catalog.loss_gaps import MeasuredGap, nearest_gaps
from meshwright.cost.ways import Met, WayOfMeeting, met_over, ways_of_meeting
from meshwright.search.advice import advice
from meshwright.search.job_rules import allowed_meetings
from meshwright.search.quorum import advise_quorum
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName, Report
from meshwright.spec.units import LEAST_SHARE, format_bytes, format_change, format_seconds

FASTER = 0.02  # of a step that another way of meeting saves, before its price in quality is told
_LINES = (LineName.PARAMETERS, LineName.GRADIENTS, LineName.OUTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way in which the ranks of a plan's layout could meet, `words`: seconds of a step, and `change`, how much more
    than the plan's that is, as a share.

    `loss` is what it cost in loss where it was measured, of the plan's own way and of those that are faster.
    """

    words: str
    learners: int
    step_seconds: float
    change: float
    fits: bool
    is_plan: bool
    loss: MeasuredGap | None

    @property
    def beside(self) -> str:
        """`6.9 % less` or `60.3 times`, beside the plan."""
        if self.is_plan:
            return "this plan"
        much = format_change(self.change) if abs(self.change) >= LEAST_SHARE else "as long"
        return much + ("" if self.fits else ", does not fit")


def ways_cells(ways: Sequence[Way]) -> list[tuple[str, ...]]:
    """The table of ways, its head first; losses where any of them was measured."""
    head = ("way to meet, predicted", "learners", "step", "beside this plan", "loss above every step")
    rows = [
        (
            way.words,
            f"{way.learners:,}",
            format_seconds(way.step_seconds),
            way.beside,
            way.loss.figure if way.loss else "-",
        )
        for way in ways
    ]
    columns = len(head) if any(way.loss for way in ways) else len(head) - 1
    return [cells[:columns] for cells in (head, *rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meetings:
    """Sentences on what ranks send and why they meet as they do, and every way of meeting, the plan's own first."""

    sentences: tuple[str, ...] = ()
    ways: tuple[Way, ...] = ()


def meetings(design: Design, predicted: Report, *, every: int | None = None) -> Meetings:
    """What is sent over which links and what of it is exposed and hidden; every way of meeting for this layout, what
    those that are faster cost in loss where it was measured, and one that the job might allow. Nothing where there is
    one data parallel rank. Losses are told where rounds or compression are in question; the plan's own way is priced
    with rounds of `every` steps where a run made them so long."""
    priced = ways_of_meeting(design if every is None else _with_rounds(design, every))
    if not priced:
        return Meetings()
    ways = _ways(design, priced)
    own = f"as {ways[0].words}" if _is_special(priced[0]) else ways[0].words
    quorum = design.plan.gradients.rounds.quorum
    ends = f", {quorum} of {design.plan.learners} learners waited for" if quorum else ""
    met = f"This plan's ranks meet {own}{ends}."
    measured = _told_losses(list(dict.fromkeys(way.loss for way in ways if way.loss)))
    advised = (*advice(design, priced), *advise_quorum(design, predicted))
    told = [f"{line[:1].upper()}{line[1:]}." for line in advised]
    if not (_is_special(priced[0]) or advised or len(allowed_meetings(design.job)) > 1):
        measured = ()
    return Meetings(
        sentences=(*_links(design, predicted), *_quorum(design, predicted), met, *measured, *told), ways=ways
    )


def _with_rounds(design: Design, every: int) -> Design:
    gradients = design.plan.gradients
    changed = replace(gradients, rounds=replace(gradients.rounds, every=every))
    return replace(design, plan=replace(design.plan, gradients=changed))


def _told_losses(gaps: Sequence[MeasuredGap]) -> tuple[str, ...]:
    """One sentence on all of them, those that were measured in one place together; none where there are none."""
    places = [
        ", ".join(f"{gap.word} {gap.figure}" for gap in gaps if gap.where == where) + f" ({where})"
        for where in dict.fromkeys(gap.where for gap in gaps)
    ]
    return (f"Loss above that of every step, after as many tokens: {'; '.join(places)}.",) if places else ()


def _ways(design: Design, priced: Sequence[WayOfMeeting]) -> tuple[Way, ...]:
    own, gaps = priced[0], _losses(design, priced)
    return tuple(
        Way(
            words=way.words if _is_special(way) else "in every step",
            learners=way.learners,
            step_seconds=way.step_seconds,
            change=way.step_seconds / own.step_seconds - 1.0,
            fits=way.fits,
            is_plan=way is own,
            loss=gaps.get(way.word),
        )
        for way in (own, *(other for other in priced[1:] if other.words != own.words))
    )


def _links(design: Design, predicted: Report) -> Iterator[str]:
    line = predicted.step.find(LineName.OUTER)
    met = met_over(design, outer_bytes=line.bytes if line else 0.0)
    for name in _LINES:
        tiers, found = [each for each in met if each.line is name], predicted.step.find(name)
        if not tiers or found is None:
            continue
        whole = predicted.detail.get(f"{name}, hidden included", found.seconds)
        hidden = max(whole - found.seconds, 0.0)
        told = [_sent(each) for each in tiers]
        shown = [
            f"{format_seconds(each.share * found.seconds)} exposed, "
            f"{format_seconds(each.share * hidden) if hidden else 'none'} hidden"
            for each in tiers
        ]
        if len(tiers) == 1:
            yield f"Of {name} a device sends {told[0]} a step: {shown[0]}."
        else:
            parts = " and ".join(f"{sent} ({times})" for sent, times in zip(told, shown, strict=True))
            yield f"Of {name} a device sends {parts} a step."


def _sent(each: Met) -> str:
    """What a device sends to others so far apart, and how much of it leaves a node, a rack or a site."""
    if each.crossing_bytes < (1.0 - LEAST_SHARE) * each.bytes:
        return f"{format_bytes(each.bytes)} over every link, {format_bytes(each.crossing_bytes)} of it {each.tier},"
    return f"{format_bytes(each.bytes)} {each.tier}"


def _quorum(design: Design, predicted: Report) -> Iterator[str]:
    """How rounds go that a quorum ends."""
    line = predicted.step.find(LineName.OUTER)
    if design.plan.gradients.rounds.quorum and line is not None and line.note:
        yield f"Rounds: {line.note}."


def _losses(design: Design, ways: Sequence[WayOfMeeting]) -> Mapping[str, MeasuredGap]:
    """Of the plan's own way, and of those that are faster, the gap in loss that was measured nearest to its model."""
    own, others = ways[0], ways[1:]
    faster = {way.word: way.every for way in others if way.step_seconds < (1.0 - FASTER) * own.step_seconds}
    known = nearest_gaps({own.word: own.every} | faster, parameters=design.model.parameters)
    return {gap.word: gap for gap in known}


def _is_special(way: WayOfMeeting) -> bool:
    """In rounds or compressed."""
    return bool(way.every or way.compression)
