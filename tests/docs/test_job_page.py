from __future__ import annotations

from pathlib import Path

from meshwright import catalog
from tests.docs.page import page, shown


def test_the_job_page_shows_every_field_with_its_default() -> None:
    assert catalog.job_template().rstrip() in page("job.md")


def test_the_jobs_that_the_page_on_training_shows_load(tmp_path: Path) -> None:
    blocks = shown(page("training.md"))
    assert blocks
    for place, block in enumerate(blocks):
        file = tmp_path / f"{place}.toml"
        file.write_text(block)
        assert catalog.load_job(file) != catalog.load_job(None)
