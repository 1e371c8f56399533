"""Parameters of a test of which a few are quick: the rest are slow, and run in `make test-full`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], *, quick: int) -> list[Any]:
    """`values` for `pytest.mark.parametrize`, all but `quick` of them, which are spread evenly, marked slow."""
    every = list(values)
    assert 0 < quick < len(every), "some are quick and some are slow"
    chosen = {round(place * (len(every) - 1) / max(quick - 1, 1)) for place in range(quick)}
    return [value if index in chosen else _slow(value) for index, value in enumerate(every)]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
