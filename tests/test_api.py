"""The Python API: the commands as functions, and nothing heavy until one is called."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwright

# Values of other kinds than what is called takes.
NOTHING: Any = None
NUMBER: Any = 5
TABLE: Any = {}


def test_every_public_name_is_there() -> None:
    for name in meshwright.__all__:
        assert getattr(meshwright, name) is not None
    assert set(dir(meshwright)) >= set(meshwright.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = meshwright.nothing


def test_a_function_stays_one_when_the_room_of_its_name_is_imported() -> None:
    script = "import meshwright, meshwright.train; assert callable(meshwright.train), meshwright.train"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_design_predict_and_explain_take_names_and_files(tmp_path: Path) -> None:
    job = meshwright.JobSpec(batch_tokens=2**20)
    decision = meshwright.design("llama-3.1-8b", "8xH100", job, top=2)
    path = tmp_path / "plan.json"
    path.write_text(decision.design.to_json())
    assert len(decision.ranked) == 2
    assert meshwright.predict(path) == meshwright.predict(decision.design) == decision.report
    assert decision.design.plan.describe() in "\n".join(meshwright.explain(path).lines())


def test_a_plan_that_no_search_would_answer_with_is_not_priced() -> None:
    """By the rules that `explain` and `export` ask."""
    design = meshwright.design("tiny", "local:1", meshwright.JobSpec(sequence_length=128, batch_tokens=2048)).design
    for changes, words in (
        ({"microbatch": 10**9}, r"plan.microbatch: .*batch-is-asked"),
        ({"sequence_length": 2}, r"plan.sequence_length: 2 is not the job's 128"),
        ({"stages": (replace(design.plan.stages[0], rank=10**18),)}, r"plan.stages\[0\].rank: "),
    ):
        with pytest.raises(meshwright.MeshwrightError, match=words):
            meshwright.predict(replace(design, plan=replace(design.plan, **changes)))


@pytest.mark.parametrize(
    ("called", "words"),
    [
        (lambda: meshwright.predict(NOTHING), "design: NoneType is no Design or Path or str"),
        (lambda: meshwright.explain(NOTHING), "path: NoneType is no Path or str"),
        (lambda: meshwright.design(NOTHING, NUMBER), "model: NoneType is no(.|\n)*cluster: int is no"),
        (lambda: meshwright.design("tiny", "local:1", TABLE), "job: dict is no JobSpec or str"),
        (lambda: meshwright.export("x", to=NOTHING), "to: NoneType is no str"),
        (lambda: meshwright.why_not("tiny", "local:1", settings=NUMBER), "settings: int is no str or"),
    ],
    ids=["predict", "explain", "design", "job", "export", "why_not"],
)
def test_a_value_of_another_kind_is_told_in_words(called: Callable[[], object], words: str) -> None:
    with pytest.raises(meshwright.MeshwrightError, match=words):
        called()


def test_specs_are_reached_without_numpy() -> None:
    names = [name for name in meshwright.__all__ if name[0].isupper() and name not in ("Candidate", "Decision")]
    script = (
        f"import sys, meshwright\nfor name in {names!r}: getattr(meshwright, name)\nassert 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
