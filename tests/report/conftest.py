from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.synthetic import write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "novels")
