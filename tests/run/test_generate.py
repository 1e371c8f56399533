"""What is refused before a model is loaded to write text."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.run.audit import audit
from meshwright.run.generate import Sample, _keep, generate
from meshwright.spec.errors import ConfigError


def test_a_folder_that_no_run_wrote_and_a_prompt_that_is_no_text_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="not a run directory"):
            generate(place)
        with pytest.raises(ConfigError, match="not a run directory"):
            audit(place, cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match="the prompt is not UTF-8 text"):
        generate(tmp_path, "Z\udcc3rich")


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_that_no_generator_takes_is_refused(tmp_path: Path, seed: int) -> None:
    with pytest.raises(ConfigError, match=rf"--seed: {seed} is not from 0 to below 2\^63"):
        generate(tmp_path, seed=seed)


def test_text_that_the_run_cannot_keep_is_told_and_not_lost(tmp_path: Path) -> None:
    place = tmp_path / "sample.txt"
    place.mkdir()  # as in a run that takes no file
    told = Sample(text="text", step=3, unkept=_keep("text", place)).lines()
    assert told == (f"warning: {place}: the text is not kept for the run's page: Is a directory",)
    place.rmdir()
    assert _keep("text", place) is None
    assert place.read_text() == "text"
