"""Choices are those that are taken, names that are near are offered and no others, and sets are told where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import catalog, search
from meshwright.catalog.documents import read
from meshwright.search.job_rules import check_job
from meshwright.spec.cluster import Precision
from meshwright.spec.codec import encode
from meshwright.spec.errors import ConfigError
from meshwright.spec.synchronize import ROUND_PRECISIONS
from tests.search import search_samples as samples


def refused(*sets: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        catalog.load_job(path, sets=sets)
    return str(caught.value)


@pytest.mark.parametrize("field", ["precision", "other_precisions", "synchronize.precision"])
def test_every_precision_that_is_offered_is_taken_and_no_other(field: str) -> None:
    listed = field.startswith("other")
    offered = refused(f"{field}=[7]" if listed else f"{field}=7").partition("one of ")[2].split(", ")
    for word in (*Precision, "auto"):
        text = f'{field}=["{word}"]' if listed else f"{field}={word}"
        if word in offered:
            catalog.load_job(None, sets=[text])
        else:
            assert f"one of {', '.join(offered)}" in refused(text)
    assert "int8" not in offered or field == "synchronize.precision"
    assert ("auto" in offered) == (field == "precision")
    if field == "synchronize.precision":
        assert set(offered) == set(ROUND_PRECISIONS)


def test_a_section_that_only_a_set_names_is_not_looked_for_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[spike]\nwindow = 64\n\n[chekpoint]\nkeep = 3\n")
    told = refused("spik.window=3", "model.layers=3", "chekpoint.keep=4", "data.sources.0.weight=2", path=path)
    lines = told.splitlines()
    assert any(line.startswith("--set spik.window: unknown key; did you mean 'spike'?") for line in lines)
    assert any(line.startswith("--set model.layers: names a model, not a field of the job") for line in lines)
    assert any(line.startswith(f"{path}:4 chekpoint: unknown key; did you mean 'checkpoint'?") for line in lines)
    assert any(line.startswith("--set data.sources[0].weight: 'path' is missing") for line in lines)


def test_a_design_is_not_blamed_for_what_a_set_says(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = search.design(samples.model(), samples.cluster(), samples.job(), top=1).design
    path.write_text(found.to_json())
    with pytest.raises(ConfigError, match=r"^--set spike\.window: unknown key; did you mean 'job\.spike'"):
        catalog.load_design(path, sets=["spike.window=3"])
    assert encode(catalog.load_design(path)) == encode(found)


@pytest.mark.parametrize(("name", "near"), [("nofile.toml", ""), ("jb.toml", "job.toml"), ("model.json", "model.toml")])
def test_files_are_near_by_their_names_and_not_by_their_endings(tmp_path: Path, name: str, near: str) -> None:
    for other in ("demo.toml", "job.toml", "model.toml"):
        (tmp_path / other).write_text("a = 1\n")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / name)
    assert str(caught.value).partition("no such file")[2] == (f"; did you mean '{near}'?" if near else "")


@pytest.mark.parametrize(("name", "near"), [("3", "one of auto, torch,"), ("megatron", "did you mean 'megatron-")])
def test_software_that_is_not_known_comes_with_what_is(tmp_path: Path, name: str, near: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"software = {name if name.isdecimal() else repr(name)}\n")
    job = catalog.load_job(path)
    with pytest.raises(ConfigError) as caught:
        check_job(samples.model(), samples.cluster(), job)
    told = str(caught.value)
    assert f"software {name!r} is not known" in told
    assert near in told


def test_a_number_for_a_tokenizer_is_told_how_to_train_one() -> None:
    assert catalog.load_job(None, sets=["data.tokenizer=8192"]).data.tokenizer == "8192"
    assert 'write "3", in quotes' in refused("name=3")


def test_fields_of_a_model_are_said_to_be_of_the_model() -> None:
    with pytest.raises(ConfigError) as error:
        catalog.load_job(None, sets=["model.layers=3", "model=tiny", "seeds=4", "seed=2"])
    assert [problem.where for problem in error.value.problems] == ["--set model.layers", "--set model", "--set seeds"]
    assert "--model says which model it is" in str(error.value)
    assert catalog.load_job(None, sets=["seed=2"]).seed == 2
