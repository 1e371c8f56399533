"""Weights and tokenizers that are not what a conversion or a generation needs: refused by name, with nothing left."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import catalog
from meshwright.catalog.huggingface.folder import open_folder
from meshwright.cli import app
from meshwright.nn.generate import Sampling, _choose
from meshwright.nn.generate import generate as write_tokens
from meshwright.run import convert, verify
from meshwright.run import generate as generating
from meshwright.run.preflight import check_start
from meshwright.spec.errors import ConfigError, ExitCode
from meshwright.train.huggingface.files import MappedFiles, write_file
from tests.huggingface.test_convert import folder_of

QUERY, HEAD, TABLE = "model.layers.0.self_attn.q_proj.weight", "lm_head.weight", "model.embed_tokens.weight"


def changed(source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """`source` with its tensors as `change` leaves them."""
    opened = open_folder(source)
    files = MappedFiles(opened.tensors)
    tensors = {name: files.tensor(name).clone() for name in opened.tensors}
    change(tensors)
    write_file(
        source / "model.safetensors",
        {name: ("F32", tuple(x.shape)) for name, x in tensors.items()},
        make=tensors.__getitem__,
    )
    return source


def spoilt(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[QUERY][0, 0] = value

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name_and_leave_nothing(tmp_path: Path, value: float) -> None:
    source = changed(folder_of(tmp_path, "llama"), spoilt(value))
    with pytest.raises(ConfigError, match=rf"model.safetensors: {QUERY} holds nan or inf as float32"):
        convert.to_run(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_value_beyond_fp16_is_refused_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    convert.to_run(changed(folder_of(tmp_path, "llama"), spoilt(1e5)), tmp_path / "run")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=rf"--dtype: {QUERY} holds 1e\+05, beyond float16; use bf16 or fp32"):
        convert.to_huggingface(tmp_path / "run", tmp_path / "out", dtype="fp16", shard_bytes=3000)
    assert not list((tmp_path / "out").iterdir())
    assert convert.to_huggingface(tmp_path / "run", tmp_path / "out", dtype="bf16").dtype == "bfloat16"


def test_a_run_that_diverged_writes_no_text_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = changed(folder_of(tmp_path, "llama"), spoilt(float("nan")))
    finite = torch.ones((), dtype=torch.bool)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "isfinite", lambda _: finite)
        convert.to_run(source, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run: step 0: layers\.0\.mixer\.query\.weight holds nan or inf"):
        generating.generate(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"checkpoint: layers\.0\.mixer\.query\.weight holds nan or inf"):
        convert.to_huggingface(tmp_path / "run", tmp_path / "out", dtype="fp32")
    assert not (tmp_path / "out").exists()


def test_a_stored_head_that_is_not_the_table_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    def beside(made: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors[HEAD] = made(tensors[TABLE])

        return change

    source = changed(folder_of(tmp_path, "llama3"), beside(torch.clone))
    convert.to_run(source, tmp_path / "same")
    kept = catalog.load_design(tmp_path / "same")
    begun = catalog.load_design(tmp_path / "same").job
    check_start(replace(kept, job=replace(begun, start=str(source))))
    for made in (lambda x: x + 1, lambda x: x[:3].clone()):
        changed(source, beside(made))
        for work in (
            lambda: convert.to_run(source, tmp_path / "run"),
            lambda: check_start(replace(kept, job=replace(begun, start=str(source)))),
        ):
            with pytest.raises(ConfigError, match=rf"{HEAD} is not {TABLE} .*tie_word_embeddings .*remove {HEAD}"):
                work()
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_cannot_be_read_is_told_before_weights_are_written(tmp_path: Path) -> None:
    source = folder_of(tmp_path, "llama")
    for text in ("{}", '{"model"', "\x00"):
        (source / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer.json: not a tokenizer file"):
            convert.to_run(source, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_tokenizer_larger_than_the_vocabulary_is_told_and_its_ids_are_refused(tmp_path: Path) -> None:
    """A model of 48 ids and a tokenizer of 256 bytes."""
    source = folder_of(tmp_path, "llama")
    (source / "tokenizer.json").write_text(json.dumps({"kind": "bytes"}))
    found = convert.to_run(source, tmp_path / "run")
    assert "ids up to 255" in found.lines()[1]
    assert "reads 48" in found.lines()[1]
    with pytest.raises(ConfigError, match="the prompt has token 97 and the model reads ids below 48"):
        generating.generate(tmp_path / "run", "a")


def test_sparse_attention_is_converted_and_read_back_no_further_than_it_is_dense(tmp_path: Path) -> None:
    source = folder_of(tmp_path, "glm_moe_dsa")
    convert.to_run(source, tmp_path / "run")
    assert catalog.load_design(tmp_path / "run").plan.sequence_length == 16
    decoder = generating.load_model(tmp_path / "run").decoder
    longest: list[int] = []
    decoder.register_forward_hook(
        lambda _module, args, kwargs, _found: longest.append(kwargs["context"].start + args[0].shape[1]),
        with_kwargs=True,
    )
    assert len(list(write_tokens(decoder, list(range(20)), count=20, sampling=Sampling(temperature=0.0)))) == 20
    assert max(longest) == 16


def test_the_least_temperature_takes_the_likeliest_and_one_that_is_no_number_is_refused(tmp_path: Path) -> None:
    logits, generator = torch.tensor([1.0, 3.0, 2.0]), torch.Generator().manual_seed(0)
    for temperature in (1e-40, 5e-324, 1e-9):
        assert _choose(logits, Sampling(temperature=temperature), generator) == 1
    for temperature in ("inf", "nan"):
        assert app.run(["generate", str(tmp_path), "-t", temperature]) == ExitCode.USAGE
        with pytest.raises(ConfigError, match="--temperature"):
            generating.generate(tmp_path, temperature=float(temperature))


def test_what_transformers_cannot_run_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("the architecture is not known\nand more")

    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr(verify, "_theirs", fails)
    source = folder_of(tmp_path, "llama")
    words = r"transformers cannot run this: ValueError: the architecture is not known; leave --verify out"
    with pytest.raises(ConfigError, match=words):
        convert.to_run(source, tmp_path / "run", check=True)
    assert not (tmp_path / "run").exists()
    nan = torch.full((1, 1, 1), float("nan"))
    monkeypatch.setattr(verify, "_theirs", lambda *_: (nan, "0.0"))
    with pytest.raises(ConfigError, match=r"logits of transformers 0\.0 hold nan or inf"):
        convert.to_run(source, tmp_path / "run", check=True)
    convert.to_run(source, tmp_path / "run")
    with pytest.raises(ConfigError, match="what is written there is whole"):
        convert.to_huggingface(tmp_path / "run", tmp_path / "out", check=True)
    assert open_folder(tmp_path / "out").tensors


def test_a_size_of_shards_is_for_weights_out_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path, "llama")
    assert app.run(["convert", str(source), str(tmp_path / "run"), "--shard-size", "1GB"]) == ExitCode.USAGE
    assert "--shard-size: is for weights out of a run" in capsys.readouterr().err
