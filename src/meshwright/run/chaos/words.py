"""Words: which of the faults that were open what a run said is of."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.spec.faults import Fault, FaultKind
from meshwright.spec.incident import Incident, Trouble

_SAID = {
    FaultKind.HANG: ("did not come", "stood still", "waited in vain"),
    FaultKind.PARTITION: ("did not come", "waited in vain", "lost contact", "lost its own network"),
    FaultKind.DISK_FULL: ("can be written", "not saved", "could not write", "could not be read or written"),
    FaultKind.PREEMPT: ("asked to stop",),
}
_NAMED = re.compile(r"ranks? ([\d, andmore]+) (?:did not come|stood still)")
_EARLY_SECONDS = 0.05  # between two clocks


def is_told(fault: Fault, words: str) -> bool:
    """Whether `words` are what a run says where that fault was done to it, of the very rank where it is known."""
    if fault.kind in (FaultKind.KILL, FaultKind.CORRUPT):
        who = "was killed (signal 9)" if fault.rank is None else f"rank {fault.rank} was killed (signal 9)"
        return who in words
    named = _NAMED.match(words) if fault.kind is FaultKind.HANG and fault.rank is not None else None
    others = named is not None and "more" not in named[1] and str(fault.rank) not in re.findall(r"\d+", named[1])
    return not others and any(said in words for said in _SAID.get(fault.kind, ()))


def told_of(faults: Sequence[Fault], words: str) -> list[bool]:
    """Of which of the `faults` that were open `words` are: of all where they fit none."""
    fits = [is_told(fault, words) for fault in faults]
    return fits if any(fits) else [True] * len(fits)


def first_named(fault: Fault, incidents: Sequence[Incident], *, at: float) -> Incident | None:
    """The first time since `at` that the run said of the rank of `fault` that it is lost."""
    for incident in incidents:
        ours = fault.rank is None or not incident.ranks or fault.rank in incident.ranks
        if incident.trouble is Trouble.LOST and incident.at >= at - _EARLY_SECONDS and ours:
            return incident if is_told(fault, incident.what) else None
    return None
