"""How the data parallel ranks of a plan meet, in words: over which links, at what cost, and what other ways would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.catalog.loss_gaps import nearest_gaps
from meshwright.cost.ways import WayOfMeeting, met_over, ways_of_meeting
from meshwright.search.advice import advice
from meshwright.search.quorum import advise_quorum
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName, Report
from meshwright.spec.units import format_bytes, format_percent, format_seconds

LEAST = 0.0005  # of a step, by which a way takes more or less
FASTER = 0.02  # of a step that another way of meeting saves, before its price in quality is told
_LINES = (LineName.PARAMETERS, LineName.GRADIENTS, LineName.OUTER)


def meeting_sentences(design: Design, predicted: Report) -> tuple[str, ...]:
    """What is sent over which links and what of it is exposed and hidden; every way of meeting for this layout, what
    those that are faster cost in loss where it was measured, and one that the job might allow. () where there is one
    data parallel rank."""
    ways = ways_of_meeting(design)
    if not ways:
        return ()
    others = _alternatives(ways, waits="" if not design.plan.gradients.rounds.quorum else ", all learners waited for,")
    found = [*_links(design, predicted), *_quorum(design, predicted), others, *_losses(design, ways)]
    advised = (*advice(design, ways), *advise_quorum(design, predicted))
    return (*found, *(f"{line[:1].upper()}{line[1:]}." for line in advised))


def _links(design: Design, predicted: Report) -> Iterator[str]:
    line = predicted.step.find(LineName.OUTER)
    met = met_over(design, outer_bytes=line.bytes if line else 0.0)
    for name in _LINES:
        tiers, found = [each for each in met if each.line is name], predicted.step.find(name)
        if not tiers or found is None:
            continue
        whole = predicted.detail.get(f"{name}, hidden included", found.seconds)
        hidden = max(whole - found.seconds, 0.0)
        told = [f"{format_bytes(each.bytes)} {each.tier}" for each in tiers]
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


def _quorum(design: Design, predicted: Report) -> Iterator[str]:
    """How rounds go that a quorum ends."""
    line = predicted.step.find(LineName.OUTER)
    if design.plan.gradients.rounds.quorum and line is not None and line.note:
        yield f"Rounds: {line.note}."


def _alternatives(ways: Sequence[WayOfMeeting], *, waits: str) -> str:
    own = ways[0]
    told = ", ".join(_told(way, own) for way in ways[1:] if way.words != own.words)
    words = f"as {own.words}" if _is_special(own) else "in every step"
    return f"This plan's ranks meet {words}; for its layout{waits} other ways would take: {told}."


def _losses(design: Design, ways: Sequence[WayOfMeeting]) -> Iterator[str]:
    """Of the plan's own way, and of those that are faster, the gap in loss that was measured nearest to its model."""
    own, others = ways[0], ways[1:]
    faster = {way.word: way.every for way in others if way.step_seconds < (1.0 - FASTER) * own.step_seconds}
    known = nearest_gaps({own.word: own.every} | faster, parameters=design.model.parameters)
    if known:
        told = ", ".join(gap.words for gap in known)
        yield f"Loss above that of meeting whole in every step, after as many tokens, where it was measured: {told}."


def _told(way: WayOfMeeting, own: WayOfMeeting) -> str:
    change = way.step_seconds / own.step_seconds - 1.0
    much = f"{format_percent(abs(change))} {'more' if change > 0 else 'less'}" if abs(change) >= LEAST else "as long"
    fits = "" if way.fits else ", and does not fit"
    learners = f", {way.learners} learners" if way.every and not own.every else ""
    words = way.words if _is_special(way) else "in every step"
    return f"{words} {format_seconds(way.step_seconds)} ({much}{learners}{fits})"


def _is_special(way: WayOfMeeting) -> bool:
    """In rounds or compressed."""
    return bool(way.every or way.compression)
