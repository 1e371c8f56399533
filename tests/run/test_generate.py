"""What is refused before a model is loaded to write text."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.run.audit import audit
from meshwright.run.generate import generate
from meshwright.spec.errors import ConfigError


def test_a_folder_that_no_run_wrote_and_a_prompt_that_is_no_text_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="not a run directory"):
            generate(place)
        with pytest.raises(ConfigError, match="not a run directory"):
            audit(place, cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match="the prompt is not UTF-8 text"):
        generate(tmp_path, "Z\udcc3rich")
