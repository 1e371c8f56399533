"""The full run: `python -m tests.fuzz` tries a million broken inputs, no two alike, and tells what broke a reader.

Each finding is told with the line that makes its smallest input again.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from tests.fuzz import runs, specs, stores, texts
from tests.fuzz.engine import Ended, again, batch
from tests.fuzz.kind import Kind, bounded_memory

KINDS: tuple[Kind, ...] = (*specs.KINDS, *runs.KINDS, *stores.KINDS, *texts.KINDS)
NAMED: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}
MILLION = 1_000_000
_TELL_SECONDS = 5.0
_MOST_AT_ONCE = 1000  # inputs of a batch
_MOST_TRIES = 2  # for each input that is asked for: of few words only so many inputs can be made


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A batch of one kind."""

    kind: str
    seed: str
    inputs: int
    known: frozenset[str]

    def run(self) -> Ended:
        faulthandler.enable()
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place, bounded_memory():
            kind = NAMED[self.kind]
            return batch(kind, seed=self.seed, inputs=self.inputs, known=self.known, folder=Path(place))


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of inputs until now, and whose turn is next: each kind has its share of all inputs all the time."""

    shares: Mapping[str, float]
    inputs: int
    seed: int
    given: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    ended: dict[str, Ended] = field(default_factory=dict)

    @property
    def tried(self) -> int:
        return sum(ended.tried for ended in self.ended.values())

    @property
    def different(self) -> int:
        return sum(len(ended.seen) for ended in self.ended.values())

    @property
    def broken(self) -> Counter[str]:
        return sum((ended.broken for ended in self.ended.values()), Counter[str]())

    @property
    def told(self) -> set[str]:
        """Places of findings; in others, readers broke while a finding was made smaller alone."""
        return {finding.place for ended in self.ended.values() for finding in ended.findings}

    def wants_more(self) -> bool:
        """Once those that are under way have ended as well as the others did."""
        under_way = self.given.total() - self.tried
        return self.different + under_way < self.inputs and self.given.total() < _MOST_TRIES * self.inputs

    def next_task(self) -> Task:
        name = min(self.shares, key=lambda name: self.given[name] / self.shares[name])
        most = math.ceil(self.inputs * self.shares[name] / sum(self.shares.values()))
        task = Task(
            kind=name,
            seed=f"{name} {self.seed} {self.batches[name]}",
            inputs=min(most, _MOST_AT_ONCE),
            known=frozenset(self.told),
        )
        self.given[name] += task.inputs
        self.batches[name] += 1
        return task

    def add(self, task: Task, ended: Ended) -> None:
        told = self.told
        for finding in ended.findings:
            if finding.place not in told:
                print(f"FOUND {finding}", flush=True)
        self.given[task.kind] += ended.tried - task.inputs
        self.ended.setdefault(task.kind, Ended()).add(ended)

    @property
    def line(self) -> str:
        broken = self.broken
        found = f"{broken.total():,} found in {len(broken)} places"
        return f"{self.tried:,} inputs, {self.different:,} different, {found}"

    def tell(self) -> None:
        for name, ended in self.ended.items():
            became = f"{ended.taken:,} taken, {ended.refused:,} refused in words"
            print(f"{ended.tried:>9,} {name}: {len(ended.seen):,} different; {became}")
        print(self.line)


def fuzz(tally: Tally, *, processes: int) -> int:
    """The exit code once all batches have ended: 1 where something was found."""
    under_way: dict[Future[Ended], Task] = {}
    began, told = time.monotonic(), 0.0
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            while under_way or tally.wants_more():
                while len(under_way) < 2 * processes and tally.wants_more():
                    task = tally.next_task()
                    under_way[pool.submit(task.run)] = task
                for future in wait(under_way, timeout=_TELL_SECONDS, return_when=FIRST_COMPLETED).done:
                    tally.add(under_way[future], future.result())
                    del under_way[future]
                if time.monotonic() - told > _TELL_SECONDS:
                    told = time.monotonic()
                    print(f"{tally.line} in {told - began:.0f} s", flush=True)
        except BrokenProcessPool:
            seeds = ", ".join(f'"{task.seed}"' for task in under_way.values())
            print(f"FOUND a process that died in a batch of one of these seeds: {seeds}")
            tally.tell()
            return 1
    tally.tell()
    return int(bool(tally.broken))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=MILLION, help="that differ")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evenly", action="store_true", help="as many of each kind as of any other")
    parser.add_argument("--only", choices=NAMED, help="one kind alone")
    parser.add_argument("--again", metavar="BLOB", help="the input that was found, of the kind of --only")
    parser.add_argument("--processes", type=int, default=1, help="how many share the inputs")
    asked = parser.parse_args()
    if asked.again and not asked.only:
        parser.error("--again takes a kind: give --only as the finding tells it")
    kinds: Sequence[Kind] = (NAMED[asked.only],) if asked.only else KINDS
    if asked.again:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place, bounded_memory():
            again(kinds[0], asked.again, folder=Path(place))
        return 0
    shares = {kind.name: 1.0 if asked.evenly else kind.share for kind in kinds}
    return fuzz(Tally(shares=shares, inputs=asked.inputs, seed=asked.seed), processes=asked.processes)
