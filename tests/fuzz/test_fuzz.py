"""A few broken inputs of every kind; `make fuzz` tries a million."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.fuzz.full import KINDS
from tests.fuzz.kind import Finding, Kind, attempt, bounded_memory


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_broken_input_is_taken_or_refused_in_words(kind: Kind, tmp_path: Path) -> None:
    with bounded_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = [attempt(kind, seed, folder=tmp_path) for seed in range(kind.quick)]
    assert not [str(end) for end in ends if isinstance(end, Finding)]
    assert (False in ends) is kind.refuses
    assert (True in ends) is kind.takes


def test_a_reader_that_breaks_is_found(tmp_path: Path) -> None:
    def divides(_rng: object, _folder: Path) -> object:
        return 1 // 0

    def takes_a_terabyte(_rng: object, _folder: Path) -> object:
        return bytearray(1 << 40)

    with bounded_memory():
        for broken, told in ((divides, "ZeroDivisionError"), (takes_a_terabyte, "MemoryError")):
            found = attempt(Kind(name="broken", attempt=broken), 0, folder=tmp_path)
            assert isinstance(found, Finding)
            assert told in found.told
