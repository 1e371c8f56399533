"""A few broken inputs of every kind, and the engine that makes findings small; `make fuzz` tries a million.

The few are of plain seeds: what hypothesis draws hangs on which modules happen to be loaded, and a test does not.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from random import Random

import pytest

from meshwright.spec.errors import ConfigError
from tests.fuzz.engine import Ended, again, batch
from tests.fuzz.full import KINDS, Tally
from tests.fuzz.kind import Broken, Kind, bounded_memory, taken
from tests.fuzz.mutate import break_text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_broken_input_is_taken_or_refused_in_words(kind: Kind, tmp_path: Path) -> None:
    made = [kind.make(Random(f"{kind.name} {seed}")) for seed in range(kind.quick)]
    with bounded_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = [taken(kind, each, folder=tmp_path) for each in made]
    assert (False in ends) is kind.refuses
    assert (True in ends) is kind.takes


def test_a_reader_that_breaks_is_found(tmp_path: Path) -> None:
    def divides(_made: object, _folder: Path) -> object:
        return 1 // 0

    def takes_a_terabyte(_made: object, _folder: Path) -> object:
        return bytearray(1 << 40)

    def calls_itself(made: object, folder: Path) -> object:
        return calls_itself(made, folder)

    breaks = ((divides, "ZeroDivisionError"), (takes_a_terabyte, "MemoryError"), (calls_itself, "RecursionError"))
    with bounded_memory():
        for broken, told in breaks:
            with pytest.raises(Broken, match=f"{told}: .* at .*{broken.__name__}"):
                taken(Kind(name="broken", make=str, read=broken), "", folder=tmp_path)


def fragile() -> Kind:
    """Refuses texts without an `a`, and breaks in one place at braces and in another at long texts."""

    def read(text: str, _folder: Path) -> object:
        if "a" not in text:
            raise ConfigError("no a")
        if "{" in text:
            raise KeyError(text)
        return 1 // (len(text) < 100)

    return Kind(name="fragile", make=lambda rng: break_text(rng, "abc" * rng.randrange(1, 9)), read=read)


def test_findings_are_told_once_by_place_and_as_small_as_they_get(tmp_path: Path) -> None:
    ended = batch(fragile(), seed="fixed", inputs=200, known=frozenset(), folder=tmp_path)
    small = {finding.told.partition(":")[0]: finding.made for finding in ended.findings}
    assert sorted(small) == ["KeyError", "ZeroDivisionError"]
    assert len(small["KeyError"]) <= len("'{abcabc'")
    assert len(ended.findings) == 2
    assert ended.tried >= 200
    assert len(ended.seen) < ended.tried
    assert 0 < ended.taken < ended.tried - ended.broken.total()
    for finding in ended.findings:
        with pytest.raises(Broken, match=finding.told.partition(":")[0]):
            again(fragile(), finding.blob, folder=tmp_path)
    known = frozenset(ended.broken)
    after = batch(fragile(), seed="fixed", inputs=40, known=known, folder=tmp_path)
    assert known >= set(after.broken)
    assert not after.findings


def test_kinds_have_their_shares_until_enough_inputs_differ() -> None:
    tally = Tally(shares={"a": 3.0, "b": 1.0}, inputs=80_000, seed=0)
    while tally.wants_more():
        task = tally.next_task()
        first = 1000 * tally.batches[task.kind]
        differ = set(range(first, first + task.inputs * 4 // 5))
        tally.add(task, Ended(tried=task.inputs, taken=task.inputs, seen=differ))
    assert tally.different >= 80_000
    assert 2.9 < tally.ended["a"].tried / tally.ended["b"].tried < 3.1
