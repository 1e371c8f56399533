"""Which link between hosts is slow, told from how long messages take between them: beside what they took when the run
began, beside other links of the same tier, and beside what the cluster's description says.

The matrix of C4D (HPCA 2025): a host whose row and column are slow has a slow adapter, a single cell is a slow link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.spec.units import format_rate
from meshwright.train.events import LinksProbed
from meshwright.train.observe.described import Described

SLOWER = 1.2  # times as long as it took, in the quicker of two probes
SLOW_AT_FIRST = 1.5  # times as long as the median of the other links
SLOWER_THAN_SAID = 2.0  # times as long as the cluster's description says
ERRORS = 5.0  # deviations of the other links
_LEAST_SECONDS = 2e-3  # that a message takes longer: less may be the start of a process
_LEAST_UNSAID_SECONDS = 5e-3

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """What joins `hosts` gives so many bytes a second where `beside` gives more, or where it gave more itself ("").

    It is a link of two, the adapter of one, or all that joins them.
    """

    hosts: tuple[str, ...]
    now: float
    before: float
    beside: str = ""

    @property
    def words(self) -> str:
        """`the link a - b gives 31 Mbit/s of the 95 Mbit/s it gave`."""
        verb, it = ("gives", "it") if len(self.hosts) == 2 else ("give", "they")
        now = f"{_named(self.hosts)} {verb} {format_rate(self.now)}"
        if self.beside:
            return f"{now} from the start, where {self.beside} {format_rate(self.before)}"
        return f"{now} of the {format_rate(self.before)} {it} gave"


def slow_links(before: LinksProbed, now: LinksProbed) -> tuple[SlowLink, ...]:
    """What is slow now and was not before, the slowest first; none where messages take as long as they did."""
    past, took = np.array(before.seconds), np.array(now.seconds) * (before.num_bytes / max(now.num_bytes, 1))
    sent = (past > 0.0) & (took > 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        slower = np.where(sent, took / past, 0.0)
    slow = (slower > SLOWER) & (took - past > _LEAST_SECONDS)
    if not slow.any():
        return ()
    rates = _Rates(num_bytes=before.num_bytes, past=past, took=took)
    return _sorted(rates.of(cells, hosts) for hosts, cells in _grouped(slow, sent, now.hosts))


def slow_from_start(probed: LinksProbed, said: Described) -> tuple[SlowLink, ...]:
    """What is slower than others of its tier, or than the description of the cluster says; the slowest first."""
    took = np.array(probed.seconds)
    if not took.any():
        return ()
    found: list[SlowLink] = []
    for tier in np.unique(said.tiers[took > 0.0]):
        cells = (took > 0.0) & (said.tiers == tier)
        beside = _Beside(probed=probed, took=took, said=said.seconds)
        slow, links = beside.others(cells)
        unsaid = cells & ~slow & (said.seconds > 0.0) & (took > SLOWER_THAN_SAID * said.seconds)
        unsaid &= took - said.seconds > _LEAST_UNSAID_SECONDS
        rates = _Rates(num_bytes=probed.num_bytes, past=said.seconds, took=took)
        groups = _grouped(unsaid, cells, probed.hosts)
        found += links
        found += [replace(rates.of(own, hosts), beside="the cluster's description says") for hosts, own in groups]
    return _sorted(found)


def least(one: LinksProbed, other: LinksProbed) -> LinksProbed:
    """Of two probes the quicker message between each two hosts."""
    if not one.seconds:
        return other
    scaled = np.array(other.seconds) * (one.num_bytes / max(other.num_bytes, 1))
    seconds = np.minimum(np.array(one.seconds), scaled)
    return replace(one, seconds=tuple(tuple(row) for row in seconds.tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside:
    """Links of one tier beside each other, as they are and, where it is known, over what is said of them: a link is
    slow that is so by both, as of links that share a road the description knows how many do."""

    probed: LinksProbed
    took: FloatArray
    said: FloatArray

    def others(self, cells: BoolArray) -> tuple[BoolArray, list[SlowLink]]:
        """Which of `cells` are slow, and whose they are: hosts first, then what joins two of the rest."""
        slow, found, left = np.zeros_like(cells), list[SlowLink](), cells.copy()
        for host in range(len(cells)):
            own = np.zeros_like(cells)
            own[host], own[:, host] = cells[host], cells[:, host]
            if own.any(axis=0).sum() > 2 and self._slow(own, cells & ~own)[own].all():
                found.append(self._told(own, cells & ~own, (host,)))
                slow |= own
                left &= ~own
        for one, other in self._suspects(left):
            own = np.zeros_like(cells)
            own[[one, other], [other, one]] = left[[one, other], [other, one]]
            if self._slow(own, left & ~own).any():
                found.append(self._told(own, left & ~own, (one, other)))
                slow |= own
        return slow, found

    def _suspects(self, left: BoolArray) -> Iterator[tuple[int, int]]:
        """Two hosts between which a message took longer than the quickest by as much as makes a link slow."""
        if left.any():
            late = left & (self.took > SLOW_AT_FIRST * self.took[left].min())
            yield from dict.fromkeys((min(pair), max(pair)) for pair in np.argwhere(late).tolist())

    def _slow(self, own: BoolArray, others: BoolArray) -> BoolArray:
        """Which of `own` are slow beside `others`; none where there are no others."""
        if not others.any():
            return np.zeros_like(own)
        slow = own & (self.took - np.median(self.took[others]) > _LEAST_SECONDS)
        scales = [self.took]
        if (self.said[own | others] > 0.0).all():
            scales.append(self.took / np.where(self.said > 0.0, self.said, 1.0))
        for scale in scales:
            logs = np.log(scale[others])
            scatter = 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
            slow &= scale > math.exp(float(np.median(logs)) + max(math.log(SLOW_AT_FIRST), ERRORS * scatter))
        return slow

    def _told(self, own: BoolArray, others: BoolArray, whose: tuple[int, ...]) -> SlowLink:
        """Named beside the link of `others` that is nearest to their median."""
        away = np.where(others, np.abs(self.took - np.median(self.took[others])), np.inf)
        one, other = np.unravel_index(np.argmin(away), away.shape)
        hosts, usual = self.probed.hosts, self.took[one, other]
        rates = _Rates(num_bytes=self.probed.num_bytes, past=np.full_like(self.took, usual), took=self.took)
        beside = f"{_named((hosts[min(one, other)], hosts[max(one, other)]))} gives"
        return replace(rates.of(own, tuple(hosts[index] for index in whose)), beside=beside)


def _grouped(slow: BoolArray, sent: BoolArray, names: Sequence[str]) -> Iterator[tuple[Sequence[str], BoolArray]]:
    """Whose the slow cells are, of those that were sent: all hosts', one host's, or those of two."""
    slow = slow.copy()
    joined = [name for index, name in enumerate(names) if sent[index].any() or sent[:, index].any()]
    if len(joined) > 2 and slow[sent].all():
        yield joined, slow
        return
    for host, name in enumerate(names):
        own = np.zeros_like(slow)
        own[host], own[:, host] = sent[host], sent[:, host]
        if own.any(axis=0).sum() > 2 and slow[own].all():
            yield (name,), own
            slow[own] = False
    for one, other in dict.fromkeys((min(pair), max(pair)) for pair in np.argwhere(slow).tolist()):
        pair = np.zeros_like(slow)
        pair[[one, other], [other, one]] = slow[[one, other], [other, one]]
        yield (names[one], names[other]), pair


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    num_bytes: int
    past: FloatArray
    took: FloatArray

    def of(self, cells: BoolArray, hosts: Sequence[str]) -> SlowLink:
        """The slowest of `cells` as it is and was."""
        worst = np.unravel_index(np.argmax(np.where(cells, self.took, 0.0)), cells.shape)
        now, before = self.num_bytes / self.took[worst], self.num_bytes / self.past[worst]
        return SlowLink(hosts=tuple(hosts), now=float(now), before=float(before))


def _sorted(links: Iterable[SlowLink]) -> tuple[SlowLink, ...]:
    return tuple(sorted(links, key=lambda link: link.now / link.before))


def _named(hosts: Sequence[str]) -> str:
    named = {1: "all links of host {}", 2: "the link {} - {}"}.get(len(hosts), "every link between the hosts")
    return named.format(*hosts)
