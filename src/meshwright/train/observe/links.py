"""Which link between hosts became slow, told from how long messages took between them then and now.

The matrix of C4D (HPCA 2025): a host whose row and column are slow has a slow adapter, a single cell is a slow link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.spec.units import format_rate
from meshwright.train.events import LinksProbed

SLOWER = 1.4  # times as long as it took
_LEAST_SECONDS = 2e-3  # that a message takes longer: less may be the start of a process


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """What joins `hosts` gives so many bytes a second where it gave more: a link of two, the adapter of one, or all
    that joins them."""

    hosts: tuple[str, ...]
    now: float
    before: float

    @property
    def words(self) -> str:
        """`the link a - b gives 31 Mbit/s of the 95 Mbit/s it gave`."""
        named = {1: "all links of host {}", 2: "the link {} - {}"}.get(len(self.hosts), "every link between the hosts")
        verb = "gives" if len(self.hosts) == 2 else "give"
        what = named.format(*self.hosts)
        return f"{what} {verb} {format_rate(self.now)} of the {format_rate(self.before)} {_it(self.hosts)} gave"


def slow_links(before: LinksProbed, now: LinksProbed) -> tuple[SlowLink, ...]:
    """What is slow now and was not before, the slowest first; none where messages take as long as they did."""
    past, took = np.array(before.seconds), np.array(now.seconds) * (before.num_bytes / max(now.num_bytes, 1))
    sent = (past > 0.0) & (took > 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        slower = np.where(sent, took / past, 0.0)
    slow = (slower > SLOWER) & (took - past > _LEAST_SECONDS)
    if not slow.any():
        return ()
    rates = _Rates(hosts=now.hosts, num_bytes=before.num_bytes, past=past, took=took)
    if len(now.hosts) > 2 and slow[sent].all():
        return (rates.of(slow, now.hosts),)
    found = []
    for host, name in enumerate(now.hosts):
        own = np.zeros_like(slow)
        own[host], own[:, host] = sent[host], sent[:, host]
        if len(now.hosts) > 2 and slow[own].all():
            found.append(rates.of(own, (name,)))
            slow[own] = False
    for first in range(len(now.hosts)):
        for second in range(first + 1, len(now.hosts)):
            pair = np.zeros_like(slow)
            pair[first, second] = pair[second, first] = True
            if slow[pair].any():
                found.append(rates.of(pair & slow, (now.hosts[first], now.hosts[second])))
    return tuple(sorted(found, key=lambda link: link.now / link.before))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    hosts: Sequence[str]
    num_bytes: int
    past: npt.NDArray[np.float64]
    took: npt.NDArray[np.float64]

    def of(self, cells: npt.NDArray[np.bool_], hosts: Sequence[str]) -> SlowLink:
        """The slowest of `cells` as it is and was."""
        worst = np.unravel_index(np.argmax(np.where(cells, self.took, 0.0)), cells.shape)
        now, before = self.num_bytes / self.took[worst], self.num_bytes / self.past[worst]
        return SlowLink(hosts=tuple(hosts), now=float(now), before=float(before))


def _it(hosts: Sequence[str]) -> str:
    return "it" if len(hosts) == 2 else "they"
