"""Checkpoints, weights and caches that strangers made or a disk spoilt."""

from __future__ import annotations

import hashlib
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
from meshwright.train.checkpoint.manifest import COMMITTED, MANIFEST
from meshwright.train.ledger import Ledger
from meshwright.train.state import TrainState
from tests.fuzz.kind import Files, Kind, of_file, of_files, put
from tests.fuzz.mutate import break_bytes, break_value, json_text, once_in
from tests.fuzz.specs import configs

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


def manifest(rng: Random) -> Files:
    """A sealed checkpoint whose manifest is spoilt."""
    content = json_text(rng, break_value(rng, MANIFEST_OF_ONE)).encode("utf-8", "surrogatepass")
    told = break_bytes(rng, content) if once_in(10, rng) else content
    mark = hashlib.sha256(told).hexdigest().encode()
    return {TENSORS: b"abc", MANIFEST: told, COMMITTED: break_bytes(rng, mark) if once_in(20, rng) else mark}


def take_up(folder: Path) -> object:
    """What a manifest says of the run is taken up as by a run that goes on."""
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


def index(rng: Random) -> Files:
    text, content = checkpoint()
    return {stored.INDEX: json_text(rng, break_value(rng, json.loads(text))), TENSORS: content}


def tensor_bytes(rng: Random) -> Files:
    text, content = checkpoint()
    return {stored.INDEX: text, TENSORS: break_bytes(rng, content)}


def safetensors(rng: Random) -> Files:
    """A header with other numbers than it should have, or with bytes spoilt."""
    whole = write_header({"a": ("F32", (2, 3)), "b": ("BF16", (5,)), "c": ("I64", ())}, metadata={"format": "pt"})
    if rng.randrange(5) < 3:
        told = break_value(rng, json.loads(whole[8:]))
        text = json_text(rng, told).encode("utf-8", "surrogatepass")
        length = rng.choice((len(text), len(text), len(text), 2**63, 2**64 - 1, 0, len(text) + 1))
        content = length.to_bytes(8, "little") + text + bytes(42)
    else:
        content = break_bytes(rng, whole + bytes(42))
    return {"x.safetensors": content}


def weights_folder(rng: Random) -> Files:
    """A folder in the Hugging Face form: its config or its index is spoilt, its weights are not there."""
    config = rng.choice(configs()[:4])
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    spoilt = once_in(2, rng)
    told = index if spoilt else break_value(rng, index)
    return {
        "config.json": json_text(rng, break_value(rng, config)) if spoilt else json.dumps(config),
        "model.safetensors.index.json": json_text(rng, told),
    }


@cache
def shard() -> tuple[str, dict[str, bytes]]:
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "a.txt"
        text.write_text("the mill stood by a slow river " * 20)
        open_shard(Source(path=str(text)), tokenizer=ByteTokenizer(), cache=Path(place) / "cache")
        (folder,) = (path for path in (Path(place) / "cache").iterdir() if path.is_dir())
        return text.read_text(), {path.name: path.read_bytes() for path in folder.iterdir()}


def cache_of_text(rng: Random) -> Files:
    """A file of tokenised text, spoilt."""
    _, files = shard()
    name = rng.choice(tuple(files))
    if name == "index.json" and not once_in(3, rng):
        return {name: json_text(rng, break_value(rng, json.loads(files[name])))}
    return {name: break_bytes(rng, files[name])}


def read_cache(spoilt: Files, folder: Path) -> object:
    """It is found out and made again, and what is read is whole."""
    text, _ = shard()
    (folder / "a.txt").write_text(text)
    source, cache = Source(path=str(folder / "a.txt")), folder / "cache"
    whole = open_shard(source, tokenizer=ByteTokenizer(), cache=cache)
    (place,) = (path for path in cache.iterdir() if path.is_dir())
    put(place, spoilt)
    found = open_shard(source, tokenizer=ByteTokenizer(), cache=cache)
    assert np.array_equal(found.tokens[:], whole_tokens(text)), "spoilt tokens were read"
    assert found.offsets.tolist() == [0, len(found.tokens)], "spoilt places of documents were read"
    return whole


def whole_tokens(text: str) -> np.ndarray:
    return np.concatenate(([0], np.frombuffer(text.encode(), dtype=np.uint8)))


KINDS = (
    Kind(name="manifest", make=manifest, read=of_files(take_up), share=3),
    Kind(name="index of a checkpoint", make=index, read=of_files(load), share=2),
    Kind(name="tensors of a checkpoint", make=tensor_bytes, read=of_files(load), share=1),
    Kind(name="safetensors header", make=safetensors, read=of_file("x.safetensors", read_header), share=8),
    Kind(
        name="folder of weights",
        make=weights_folder,
        read=of_files(lambda folder: (read_config(folder), open_folder(folder))),
        share=0.3,
        quick=10,
        takes=False,
    ),
    Kind(name="cache of tokenised text", make=cache_of_text, read=read_cache, share=1, quick=60),
)
