"""Every family converted is what transformers computes: names, shapes and logits, kept as it gave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.catalog.huggingface import model_from_config
from meshwright.catalog.huggingface.folder import open_folder
from meshwright.catalog.huggingface.tensors import tensors
from meshwright.nn import Decoder
from meshwright.parallel.relocate import whole_of
from meshwright.spec.model import language_model
from meshwright.train.huggingface import load_weights
from tests.huggingface import oracle
from tests.huggingface.cases import TOKENS, configs
from tests.huggingface.folders import write_model
from tests.huggingface.whole import Whole

CASES = configs()
TOLD: dict[str, Any] = json.loads(oracle.TOLD.read_text())
# The oracle works in float64 but for norms, softmaxes and angles, which it forms in fp32.
TOLERANCE = 5e-6


def loaded(folder: Path) -> Decoder:
    opened = open_folder(folder)
    decoder = Decoder(opened.model).to(torch.float64)
    load_weights(whole_of(Whole(parts=(decoder,))), opened, group=None)
    return decoder.eval()


@pytest.mark.parametrize("case", CASES)
def test_a_table_has_the_tensors_that_the_oracle_saves(case: str) -> None:
    config = TOLD[case]["config"]
    table = tensors(config, language_model(model_from_config(config, name="x")))
    stored = TOLD[case]["tensors"]
    rest = {name for name in stored if table.is_rest(name)}
    assert {name: list(shape) for name, shape in table.theirs.items()} | {name: stored[name] for name in rest} == stored
    assert len(rest) == (10 if case == "glm_moe_dsa" else 0)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_oracle(case: str, tmp_path: Path) -> None:
    decoder = loaded(write_model(tmp_path, CASES[case], TOLD[case]["tensors"]))
    with torch.no_grad():
        ours = decoder(torch.tensor([TOKENS]))[0].numpy()
    theirs = np.load(oracle.LOGITS)[case]
    assert np.abs(theirs).max() > 0.5
    assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


@pytest.mark.parametrize("case", CASES)
def test_a_config_as_the_oracle_writes_it_is_the_same_model(case: str) -> None:
    published, written = (model_from_config(config, name="x") for config in (CASES[case], TOLD[case]["config"]))
    assert published == written
