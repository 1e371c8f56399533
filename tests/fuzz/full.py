"""The full run: `python -m tests.fuzz` breaks a million inputs of every kind and tells those that broke a reader.

Inputs are made from seeds, so that each can be made again; `--only KIND --seed SEED --inputs 1` does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from tests.fuzz import runs, specs, stores, texts
from tests.fuzz.kind import Finding, Kind, attempt, bounded_memory

KINDS: tuple[Kind, ...] = (*specs.KINDS, *runs.KINDS, *stores.KINDS, *texts.KINDS)
MILLION = 1_000_000
_TELL_SECONDS = 5.0
_MOST_TOLD = 3  # findings of one place in the source


@dataclass(slots=True)
class Tally:
    """What became of inputs until now."""

    tried: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    found: dict[str, list[Finding]] = field(default_factory=dict)

    def add(self, kind: Kind, ended: Finding | bool) -> None:
        self.tried[kind.name] += 1
        if isinstance(ended, Finding):
            place = f"{ended.kind} {ended.told.partition(':')[0]} {ended.told.rpartition(' at ')[2]}"
            self.found.setdefault(place, []).append(ended)
            if len(self.found[place]) <= _MOST_TOLD:
                print(f"FOUND {ended}", flush=True)
        else:
            self.taken[kind.name] += ended


def order(inputs: int, seed: int) -> Iterator[tuple[Kind, int]]:
    """Every kind in its share, all the time."""
    shares = sum(kind.share for kind in KINDS)
    owed = {kind.name: 0.0 for kind in KINDS}
    given = Counter[str]()
    for number in range(1, inputs + len(KINDS) + 1):
        for kind in KINDS:
            while owed[kind.name] + kind.share / shares >= given[kind.name] + 1:
                yield kind, seed + given[kind.name]
                given[kind.name] += 1
            owed[kind.name] = number * kind.share / shares


def fuzz(share: Share) -> Tally:
    """What became of the inputs of one process."""
    warnings.simplefilter("ignore")
    tally, began, told = Tally(), time.monotonic(), 0.0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place, bounded_memory():
        folders = {kind.name: Path(place) / str(number) for number, kind in enumerate(KINDS)}
        for folder in folders.values():
            folder.mkdir()
        for done, (kind, seed) in enumerate(share.inputs(), 1):
            tally.add(kind, attempt(kind, seed, folder=folders[kind.name]))
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                found = sum(map(len, tally.found.values()))
                whose = f"process {share.process}: " if share.processes > 1 else ""
                print(f"{whose}{done:,} inputs in {told - began:.0f} s, {found:,} found", flush=True)
    return tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Every so many-th of `count` inputs, of `only` one kind or of all."""

    count: int
    seed: int
    only: str | None
    evenly: bool
    process: int
    processes: int

    def inputs(self) -> Iterator[tuple[Kind, int]]:
        return islice(self._all(), self.process, None, self.processes)

    def _all(self) -> Iterator[tuple[Kind, int]]:
        if self.only:
            kind = next(kind for kind in KINDS if kind.name == self.only)
            return ((kind, self.seed + number) for number in range(self.count))
        if self.evenly:
            each = -(-self.count // len(KINDS))
            return ((kind, self.seed + number) for kind in KINDS for number in range(each))
        return islice(order(self.count, self.seed), self.count)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=MILLION)
    parser.add_argument("--seed", type=int, default=0, help="of the first input of every kind")
    parser.add_argument("--evenly", action="store_true", help="as many of each kind as of any other")
    parser.add_argument("--only", choices=[kind.name for kind in KINDS], help="one kind alone")
    parser.add_argument("--processes", type=int, default=1, help="how many share the inputs")
    asked = parser.parse_args()
    given = {"count": asked.inputs, "seed": asked.seed, "only": asked.only, "evenly": asked.evenly}
    shares = [Share(**given, process=number, processes=asked.processes) for number in range(asked.processes)]
    if asked.processes == 1:
        tallies = [fuzz(shares[0])]
    else:
        with ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn")) as pool:
            tallies = list(pool.map(fuzz, shares))
    tried, taken = (sum((getattr(tally, name) for tally in tallies), Counter[str]()) for name in ("tried", "taken"))
    for name, count in tried.items():
        print(f"{count:>9,} {name}: {taken[name]:,} taken, the others refused in words")
    found = sum(len(each) for tally in tallies for each in tally.found.values())
    places = {place for tally in tallies for place in tally.found}
    print(f"{sum(tried.values()):,} inputs, {found:,} found in {len(places)} places")
    return int(bool(found))
