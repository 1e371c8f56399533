"""Checkpoints, weights and caches that strangers made or a disk spoilt."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch

from meshwright.catalog.huggingface.folder import open_folder, read_config
from meshwright.catalog.huggingface.header import read_header, write_header
from meshwright.data.shards import open_shard
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.parallel import stored
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import Source
from meshwright.train.checkpoint import open_checkpoint
from meshwright.train.checkpoint.manifest import COMMITTED, MANIFEST, digest_of
from meshwright.train.ledger import Ledger
from meshwright.train.state import TrainState
from tests.fuzz.kind import Kind
from tests.fuzz.mutate import break_bytes, break_value, json_text
from tests.fuzz.specs import configs, put

TENSORS = "rank-0.tensors"
MANIFEST_OF_ONE = {
    "step": 2,
    "state": {
        "step": 2,
        "tokens": 20,
        "consumed": 4,
        "seed": 1,
        "ledger": {"since": 0, "read": "00000000000000ff", "dropped": 0, "skipped": [[1, 2]]},
    },
    "plan": "abc",
    "layout": "one",
    "model": "def",
    "model_name": "tiny",
    "world_size": 1,
    "versions": {"torch": "2"},
    "files": {"rank-0.tensors": {"bytes": 3, "step": 2}},
    "index": "x",
    "ranks": {"0": []},
    "schema": 3,
}


def manifest(rng: Random, folder: Path) -> object:
    """A sealed checkpoint whose manifest is spoilt; what it says of the run is taken up as by a run that goes on."""
    (folder / TENSORS).write_bytes(b"abc")
    content = json_text(rng, break_value(rng, MANIFEST_OF_ONE)).encode("utf-8", "surrogatepass")
    (folder / MANIFEST).write_bytes(break_bytes(rng, content) if rng.random() < 0.1 else content)
    mark = digest_of(folder / MANIFEST).encode()
    (folder / COMMITTED).write_bytes(break_bytes(rng, mark) if rng.random() < 0.05 else mark)
    found = open_checkpoint(folder)
    if isinstance(found, Problem):
        raise ConfigError(found)
    state = TrainState()
    state.load(found.manifest.state)
    return Ledger.of(found.manifest.state.get("ledger"), consumed=state.consumed)


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.tensor(3)}


@cache
def checkpoint() -> tuple[str, bytes]:
    """The index of a checkpoint, and the file of its tensors."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        stored.write(tensors(), folder, group=None)
        return (folder / stored.INDEX).read_text(), (folder / TENSORS).read_bytes()


def load(folder: Path) -> object:
    """As a run that goes on loads: sums first, then what its model has of the tensors that are there."""
    try:
        if spoilt := stored.spoilt_part(folder):
            raise ConfigError(f"{spoilt} is spoilt")
    except OSError as error:
        raise ConfigError(str(error)) from None
    reader = stored.Reader(folder)
    held = stored.held_in(reader)
    targets = {name: x for name, x in tensors().items() if name in held and held[name].shape == tuple(x.shape)}
    stored.read(targets, reader, group=None)
    return targets


def index(rng: Random, folder: Path) -> object:
    text, content = checkpoint()
    put(folder, stored.INDEX, json_text(rng, break_value(rng, json.loads(text))))
    (folder / TENSORS).write_bytes(content)
    return load(folder)


def tensor_bytes(rng: Random, folder: Path) -> object:
    text, content = checkpoint()
    (folder / stored.INDEX).write_text(text)
    (folder / TENSORS).write_bytes(break_bytes(rng, content))
    return load(folder)


def safetensors(rng: Random, folder: Path) -> object:
    """A header with other numbers than it should have, or with bytes spoilt."""
    whole = write_header({"a": ("F32", (2, 3)), "b": ("BF16", (5,)), "c": ("I64", ())}, metadata={"format": "pt"})
    if rng.random() < 0.6:
        told = break_value(rng, json.loads(whole[8:]))
        text = json_text(rng, told).encode("utf-8", "surrogatepass")
        length = rng.choice((len(text), len(text), len(text), 2**63, 2**64 - 1, 0, len(text) + 1))
        content = length.to_bytes(8, "little") + text + bytes(42)
    else:
        content = break_bytes(rng, whole + bytes(42))
    (folder / "x.safetensors").write_bytes(content)
    return read_header(folder / "x.safetensors")


def weights_folder(rng: Random, folder: Path) -> object:
    """A folder in the Hugging Face form: its config or its index is spoilt, its weights are not there."""
    config = rng.choice(configs()[:4])
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    spoilt = rng.random() < 0.5
    put(folder, "config.json", json_text(rng, break_value(rng, config)) if spoilt else json.dumps(config))
    told = index if spoilt else break_value(rng, index)
    put(folder, "model.safetensors.index.json", json_text(rng, told))
    read_config(folder)
    return open_folder(folder)


@cache
def shard() -> tuple[str, dict[str, bytes]]:
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "a.txt"
        text.write_text("the mill stood by a slow river " * 20)
        open_shard(Source(path=str(text)), tokenizer=ByteTokenizer(), cache=Path(place) / "cache")
        (folder,) = (path for path in (Path(place) / "cache").iterdir() if path.is_dir())
        return text.read_text(), {path.name: path.read_bytes() for path in folder.iterdir()}


def cache_of_text(rng: Random, folder: Path) -> object:
    """Tokenised text of which a file is spoilt: it is found out and made again, and what is read is whole."""
    text, files = shard()
    (folder / "a.txt").write_text(text)
    source, cache = Source(path=str(folder / "a.txt")), folder / "cache"
    whole = open_shard(source, tokenizer=ByteTokenizer(), cache=cache)
    (place,) = (path for path in cache.iterdir() if path.is_dir())
    name = rng.choice(tuple(files))
    content = (place / name).read_bytes()
    if name == "index.json" and rng.random() < 0.7:
        put(place, name, json_text(rng, break_value(rng, json.loads(content))))
    else:
        (place / name).write_bytes(break_bytes(rng, content))
    found = open_shard(source, tokenizer=ByteTokenizer(), cache=cache)
    assert np.array_equal(found.tokens[:], whole_tokens(text)), "spoilt tokens were read"
    assert found.offsets.tolist() == [0, len(found.tokens)], "spoilt places of documents were read"
    return whole


def whole_tokens(text: str) -> np.ndarray:
    return np.concatenate(([0], np.frombuffer(text.encode(), dtype=np.uint8)))


KINDS = (
    Kind(name="manifest", attempt=manifest, share=3),
    Kind(name="index of a checkpoint", attempt=index, share=2),
    Kind(name="tensors of a checkpoint", attempt=tensor_bytes, share=1),
    Kind(name="safetensors header", attempt=safetensors, share=8),
    Kind(name="folder of weights", attempt=weights_folder, share=0.3, quick=10, takes=False),
    Kind(name="cache of tokenised text", attempt=cache_of_text, share=1, refuses=False),
)
