"""Folders and files as they may come: whole, damaged, hostile, of another model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.catalog.huggingface.folder import open_folder
from meshwright.catalog.huggingface.header import LONGEST_HEADER, read_header, write_header
from meshwright.spec.errors import ConfigError
from meshwright.train.huggingface.files import MappedFiles, write_file
from tests.huggingface import oracle
from tests.huggingface.cases import configs
from tests.huggingface.folders import write_model

TOLD: dict[str, Any] = json.loads(oracle.TOLD.read_text())
SHAPES: dict[str, list[int]] = TOLD["llama"]["tensors"]
FIRST = "model.layers.0.mlp.up_proj.weight"


def raw(header: object, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(start: int, stop: int, **changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop], **changes}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        (raw({}, length=10**9), "a header of 1,000,000,000 bytes in a file of"),
        (raw({}, length=2**64 - 1), "a header of 18,446,744,073,709,551,615 bytes"),
        (raw(b"[" * 100_000), "not JSON"),
        (raw(b"\xff\xfe\x00"), "not JSON"),
        (raw([1, 2]), "not a table"),
        (raw(b'{"a": {}, "a": {}}'), "'a' is there twice"),
        (raw({"a": entry(0, 8)}, b"1234"), "it ends at byte"),
        (raw({"a": entry(0, 4)}, b"12345678"), "it ends at byte"),
        (raw({"a": entry(0, 8), "b": entry(4, 12)}, b"1" * 12), "b overlaps the tensor before it"),
        (raw({"a": entry(0, 4), "b": entry(8, 12)}, b"1" * 12), "b leaves a hole before it"),
        (raw({"a": entry(-4, 4)}, b"1" * 8), "a has no shape and place in whole numbers"),
        (raw({"a": entry(0, 4, shape=[-1])}, b"1" * 4), "no shape and place"),
        (raw({"a": entry(0, 4, shape=[2**61, 8])}, b"1" * 4), "bytes of F32"),
        (raw({"a": entry(0, 4, shape=[True])}, b"1" * 4), "no shape and place"),
        (raw({"a": entry(0, 4, dtype="F31")}, b"1" * 4), "unknown type 'F31'"),
        (raw({"a": entry(0, 4, dtype=["F32"])}, b"1" * 4), "unknown type"),
        (raw({"a": 3}, b"1" * 4), "unknown type"),
        (raw({"a": entry(0, 4, data_offsets=[0])}, b"1" * 4), "no shape and place"),
        (raw({"a": entry(0, 4, shape=[2])}, b"1" * 4), "8 bytes of F32 (2,) in a place of 4"),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_header(path)
    (problem,) = caught.value.problems
    assert why in problem.why
    assert problem.where == str(path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 4000])
def test_a_name_that_no_file_can_have_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        read_header(tmp_path / name)


def test_no_header_is_longer_than_the_format_allows(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", LONGEST_HEADER + 1))
        file.truncate(LONGEST_HEADER + 100)
    with pytest.raises(ConfigError, match="a header of 100,000,001 bytes"):
        read_header(path)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    path = write_model(tmp_path, configs()["llama"], SHAPES, dtype=dtype)
    folder = open_folder(path)
    files = MappedFiles(folder.tensors)
    again = {name: files.tensor(name).clone() for name in SHAPES}
    write_file(tmp_path / "copy", {n: (dtype, tuple(x.shape)) for n, x in again.items()}, make=again.__getitem__)
    assert (tmp_path / "copy").read_bytes() == (path / "model.safetensors").read_bytes()
    assert folder.dtypes == (dtype,)


def test_a_header_ends_where_eight_divides() -> None:
    assert all(len(write_header({"a" * n: ("F32", (2,))}, metadata={})) % 8 == 0 for n in range(1, 9))


def test_a_tensor_that_is_not_as_announced_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="announced as"):
        write_file(tmp_path / "x", {"a": ("F32", (2,))}, make=lambda _: torch.zeros(3))
    assert not (tmp_path / "x").exists()


def damaged(tmp_path: Path, **change: object) -> str:
    """What is told of a llama whose tensors are changed: None takes one away, a shape gives it another."""
    shapes: dict[str, Any] = {**SHAPES, **change}
    write_model(tmp_path, configs()["llama"], {name: shape for name, shape in shapes.items() if shape is not None})
    with pytest.raises(ConfigError) as caught:
        open_folder(tmp_path)
    return "\n".join(str(problem) for problem in caught.value.problems)


def test_everything_wrong_with_tensors_is_told_at_once(tmp_path: Path) -> None:
    misspelt = FIRST.replace("up_proj", "up_prj")
    told = damaged(tmp_path, **{FIRST: None, misspelt: SHAPES[FIRST], "model.norm.weight": [17], "odd.weight": [2]})
    assert f"{FIRST} is missing; did you mean '{misspelt}'?" in told
    assert f"{misspelt} is no tensor of the model; did you mean '{FIRST}'?" in told
    assert "model.norm.weight is (17,) and config.json makes it (16,)" in told
    assert "odd.weight is no tensor of the model" in told


def test_of_many_tensors_the_first_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    told = damaged(tmp_path, **dict.fromkeys(SHAPES)).splitlines()
    assert len(told) == 21
    assert told[-1].endswith(f"and {len(SHAPES) - 20} more like these")


def test_eight_bit_tensors_are_refused(tmp_path: Path) -> None:
    config = configs()["llama"]
    write_model(tmp_path, config, SHAPES)
    path = tmp_path / "model.safetensors"
    header = {name: ("F8_E4M3", tuple(shape)) for name, shape in SHAPES.items()}
    size = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    path.write_bytes(write_header(header, metadata={}) + b"0" * size)
    with pytest.raises(ConfigError, match="is of type F8_E4M3"):
        open_folder(tmp_path)


def sharded(path: Path) -> dict[str, str]:
    """The tensors of a llama in two files with an index; the index."""
    whole = write_model(path, configs()["llama"], SHAPES)
    files = MappedFiles(open_folder(whole).tensors)
    names, owners = list(SHAPES), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_file(path / file, {name: ("F32", tuple(SHAPES[name])) for name in part}, make=files.tensor)
        owners |= dict.fromkeys(part, file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    return owners


def test_shards_are_one_model_and_a_missing_one_is_named(tmp_path: Path) -> None:
    owners = sharded(tmp_path)
    assert {name: stored.file.name for name, stored in open_folder(tmp_path).tensors.items()} == owners
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors: not a safetensors file \(No such file"):
        open_folder(tmp_path)


def test_a_shard_that_was_cut_short_is_one_line(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="it ends at byte") as caught:
        open_folder(tmp_path)
    assert [problem.where for problem in caught.value.problems] == [str(shard)]


def test_a_single_file_that_was_cut_short_is_one_line(tmp_path: Path) -> None:
    sharded(tmp_path)
    for path in tmp_path.glob("*.safetensors*"):
        path.rename(path.with_name("model.safetensors")) if "00001" in path.name else path.unlink()
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError) as caught:
        open_folder(tmp_path)
    assert [problem.where for problem in caught.value.problems] == [str(file)]


def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    owners = sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**owners, FIRST: "../model.safetensors"}}))
    with pytest.raises(ConfigError, match="names files outside the folder"):
        open_folder(tmp_path)
    index.write_text("[]")
    with pytest.raises(ConfigError, match="is not an index"):
        open_folder(tmp_path)


def test_folders_without_safetensors_or_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(configs()["llama"]))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="which can run code when it is read"):
        open_folder(tmp_path)


def test_buffers_and_names_of_the_first_release_are_read(tmp_path: Path) -> None:
    bare = {name.removeprefix("transformer."): shape for name, shape in TOLD["gpt2"]["tensors"].items()}
    extra = {"h.0.attn.bias": [1, 1, 4, 4], "lm_head.weight": bare["wte.weight"]}
    write_model(tmp_path, configs()["gpt2"], {**bare, **extra})
    assert set(open_folder(tmp_path).tensors) == set(TOLD["gpt2"]["tensors"])
