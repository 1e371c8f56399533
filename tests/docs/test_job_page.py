from __future__ import annotations

import re
from pathlib import Path

from meshwright import catalog

TRAINING = Path(__file__).resolve().parent.parent.parent / "docs" / "training.md"
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "job.md"


def test_the_job_page_shows_every_field_with_its_default() -> None:
    assert catalog.job_template().rstrip() in PAGE.read_text()


def test_the_jobs_that_the_page_on_training_shows_load(tmp_path: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", TRAINING.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for place, block in enumerate(blocks):
        file = tmp_path / f"{place}.toml"
        file.write_text(block)
        assert catalog.load_job(file) != catalog.load_job(None)
