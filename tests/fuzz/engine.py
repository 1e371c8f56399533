"""Batches of inputs by hypothesis, which knows every draw of which an input is made and makes a finding smaller."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, reproduce_failure, settings
from hypothesis import strategies as st
from hypothesis.errors import DidNotReproduce, Flaky

from tests.fuzz.kind import Broken, Kind, taken

_SETTINGS = settings(
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=True,
)
_BLOB = re.compile(r"@reproduce_failure\('[^']*', b'([^']*)'\)")
_MOST_SHOWN = 600
_IN_ONE = 8  # inputs of an example: an example costs hypothesis as much as a small input costs its reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The smallest input that broke a reader in one place; `blob` makes it again, and is empty where the reader did not
    break each time, and `after` how many inputs of a search came until it broke."""

    kind: str
    place: str
    told: str
    made: str
    blob: str
    after: int

    def __str__(self) -> str:
        shown = self.made if len(self.made) <= _MOST_SHOWN else f"{self.made[:_MOST_SHOWN]} and so on"
        again = f'python -m tests.fuzz --only "{self.kind}" --again {self.blob}' if self.blob else "not each time"
        return f"{self.kind}: {self.told}\n    {shown}\n    {again}"


@dataclass(slots=True)
class Ended:
    """What became of inputs: how many were tried and taken, which they were, and the places in which readers broke."""

    tried: int = 0
    taken: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    @property
    def refused(self) -> int:
        return self.tried - self.taken - self.broken.total()

    def add(self, other: Ended) -> None:
        self.tried += other.tried
        self.taken += other.taken
        self.broken += other.broken
        self.seen |= other.seen
        self.findings += other.findings


def batch(kind: Kind, *, seed: str, inputs: int, known: frozenset[str], folder: Path) -> Ended:
    """At least so many inputs, the same for one seed. What breaks in a place that is not `known` is made as small as it
    gets and told once; the batch goes on after it. What is tried while a finding is made smaller comes on top."""
    ended, places, left = Ended(), set(known), inputs
    while left > 0:
        found = _search(kind, seed=f"{seed} {left}", most=left, places=places, ended=ended, folder=folder)
        if found is None:
            break
        ended.findings.append(found)
        places.add(found.place)
        left -= found.after
    return ended


def _search(kind: Kind, *, seed: str, most: int, places: set[str], ended: Ended, folder: Path) -> Finding | None:
    """The first finding beyond `places`, if there is one."""
    broke: list[tuple[Any, str, str, int]] = []
    before = ended.tried

    @hypothesis.seed(seed)
    @settings(_SETTINGS, max_examples=-(-most // _IN_ONE))
    @given(st.randoms(use_true_random=False))
    def search(rng: Random) -> None:
        for _ in range(_IN_ONE):
            made = kind.make(rng)
            ended.tried += 1
            ended.seen.add(_digest(made))
            try:
                ended.taken += taken(kind, made, folder=folder)
            except Broken as broken:
                ended.broken[broken.place] += 1
                if broken.place not in places:
                    # Not the error: its frames hold what the reader had, which may be all the memory there is.
                    broke.append((made, broken.place, str(broken), ended.tried - before))
                    raise

    try:
        search()
    except (Broken, Flaky, MemoryError) as error:
        if not broke:
            raise
        made, place, told, _ = broke[-1]
        blob = _BLOB.search("".join(getattr(error, "__notes__", ())))
        each = blob[1] if blob and isinstance(error, Broken) else ""
        return Finding(kind=kind.name, place=place, told=told, made=repr(made), blob=each, after=broke[0][3])
    return None


def again(kind: Kind, blob: str, *, folder: Path) -> None:
    """Gives a reader the input that `blob` makes, and shows it. Raises Broken where the reader breaks."""

    @reproduce_failure(hypothesis.__version__, blob.encode())
    @settings(_SETTINGS)
    @given(st.randoms(use_true_random=False))
    def once(rng: Random) -> None:
        for _ in range(_IN_ONE):
            made = kind.make(rng)
            print(f"{kind.name}: {made!r}", flush=True)
            taken(kind, made, folder=folder)

    try:
        once()
    except DidNotReproduce:
        print("its reader did not break", flush=True)


def _digest(made: Any) -> int:
    return int.from_bytes(
        hashlib.blake2b(repr(made).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )
