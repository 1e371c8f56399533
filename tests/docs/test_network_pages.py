"""What pages say of published runs over slow networks is what the cost model predicts today."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LOW_RANK = ("Pufferfish", "Cuttlefish")


@pytest.fixture(scope="module")
def published() -> ModuleType:
    path = ROOT / "benchmarks" / "network" / "published.py"
    spec = importlib.util.spec_from_file_location("network_published", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_pages_have_the_figures_of_today(published: ModuleType) -> None:
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text().splitlines() for name in ("learners", "low_rank")}
    for figure in published.figures():
        page = pages["low_rank" if figure.source.startswith(LOW_RANK) else "learners"]
        assert figure.line in page, "python benchmarks/network/published.py, then docs/learners.md and docs/low_rank.md"
