"""The oracle itself, where transformers is installed: what was kept of it is what it says now, both ways."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.run import convert
from tests.huggingface import oracle
from tests.huggingface.cases import configs
from tests.huggingface.folders import write_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install 'meshwright[verify]'",
)
CASES = configs()
TOLD: dict[str, Any] = json.loads(oracle.TOLD.read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_kept_tensors_and_logits_are_those_of_the_oracle(case: str, tmp_path: Path) -> None:
    _, shapes = oracle.saved(CASES[case], tmp_path / "saved")
    assert {name: list(shape) for name, shape in shapes.items()} == TOLD[case]["tensors"]
    found = oracle.logits_of(write_model(tmp_path / "filled", CASES[case], shapes))
    np.testing.assert_allclose(found, np.load(oracle.LOGITS)[case], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_both_directions_verify(case: str, tmp_path: Path) -> None:
    """In, from the config as transformers writes it; out in bf16; each within a hundredth of what verify allows."""
    source = write_model(tmp_path / "source", TOLD[case]["config"], TOLD[case]["tensors"], dtype="BF16")
    into = convert.to_run(source, tmp_path / "run", check=True)
    out = convert.to_huggingface(tmp_path / "run", tmp_path / "out", dtype="bf16", shard_bytes=9000, check=True)
    for found in (into.verified, out.verified):
        assert found is not None
        assert found.relative < 2e-5
        assert found.agreeing_tokens == found.tokens
