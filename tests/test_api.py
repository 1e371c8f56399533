"""The Python API: the commands as functions, and nothing heavy until one is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import meshwright


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
    decision = meshwright.design("llama-3.1-8b", "16xH100", job, top=2)
    path = tmp_path / "plan.json"
    path.write_text(decision.design.to_json())
    assert len(decision.ranked) == 2
    assert meshwright.predict(path) == meshwright.predict(decision.design) == decision.report
    assert decision.design.plan.describe() in "\n".join(meshwright.explain(path).lines())


def test_specs_are_reached_without_numpy() -> None:
    names = [name for name in meshwright.__all__ if name[0].isupper() and name not in ("Candidate", "Decision")]
    script = (
        f"import sys, meshwright\nfor name in {names!r}: getattr(meshwright, name)\nassert 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
