from __future__ import annotations

from pathlib import Path

from meshwright import catalog

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "job.md"


def test_the_job_page_shows_every_field_with_its_default() -> None:
    assert catalog.job_template().rstrip() in PAGE.read_text()
