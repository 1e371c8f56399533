"""What tests of runs may ask for."""

from __future__ import annotations

import pytest

from tests.run import dry_cases


@pytest.fixture
def counted_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry runs have one process between them, that stays: for tests of what is counted, not of who counts."""
    monkeypatch.setattr("meshwright.run.dry_run.in_children", dry_cases.in_turn)
