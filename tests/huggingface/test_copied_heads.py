"""Weights of key-value heads that several tensor ranks hold: read from a folder by each, written back once."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.catalog.huggingface.folder import open_folder
from meshwright.run import convert
from meshwright.spec.plan import Sharding
from tests.huggingface.folders import write_model
from tests.huggingface.rank_cases import begun, kept
from tests.huggingface.test_convert import CASES, TOLD, parameters_of
from tests.support.designs import Layout, design
from tests.support.pool import Pool


def test_ranks_that_hold_copies_of_key_value_heads_read_and_write_them_once(pool: Pool, tmp_path: Path) -> None:
    source = write_model(tmp_path / "llama", CASES["llama"], TOLD["llama"]["tensors"])
    expected, model = parameters_of(source), open_folder(source).model
    assert model.kv_heads == (2,)
    convert.to_run(source, tmp_path / "run")
    laid = design(model, Layout(shard=2, tensor=4, sharding=Sharding.PARAMETERS, batch=4))
    for start in (str(source), None):
        for found in pool.run(begun, laid, str(tmp_path / "run"), start, ranks=8):
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    pool.run(kept, laid, str(tmp_path / "run"), str(source), ranks=8)
    convert.to_huggingface(tmp_path / "run", tmp_path / "back", dtype="fp32")
    back = parameters_of(tmp_path / "back")
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)
