"""What a checkpoint says of itself: its files with sizes, its step, plan, model and versions."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.spec import codec
from meshwright.spec.errors import ConfigError
from meshwright.spec.json_text import parse_json
from meshwright.spec.model import MatrixRank, ModelSpec

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
SCHEMA = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of tensors, of which the index has the checksums; the checkpoint of `step` wrote it."""

    bytes: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`state` is the train state as JSON values, the data position in it; digests name the plan and the model.

    `index` is the checksum of the index of tensors; `ranks` are those of the model's matrices, by block, which a run
    may change on its way.
    """

    step: int
    state: Mapping[str, Any]
    plan: str
    layout: str
    model: str
    model_name: str
    world_size: int
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]
    index: str
    ranks: Mapping[int, tuple[MatrixRank, ...]] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def written_bytes(self) -> int:
        """Of tensors, what this checkpoint wrote itself."""
        return sum(file.bytes for file in self.files.values() if file.step == self.step)

    @property
    def referred_bytes(self) -> int:
        """Of tensors, what it has in common with an earlier one that wrote it."""
        return sum(file.bytes for file in self.files.values()) - self.written_bytes


def model_digest(model: ModelSpec) -> str:
    """Twelve hex digits that are equal for models with the same tensors, whatever they are called and of which rank."""
    bare = replace(model.causal().dense(), name="", source="")
    return hashlib.sha256(codec.lasting(bare).encode()).hexdigest()[:12]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The manifest is on the disk of `folder` and reads back as it was given. Raises OSError when it does not."""
    text = json.dumps(codec.encode(manifest), indent=1)
    write_durably(folder / MANIFEST, text)
    if read_manifest(folder) != manifest:
        raise OSError(f"{folder / MANIFEST} does not read back as it was written")


def read_manifest(folder: Path) -> Manifest | str:
    """The manifest of `folder`, or why there is none, in words."""
    try:
        value = parse_json((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError) as error:
        return f"its manifest cannot be read: {error}"
    if isinstance(value, dict) and value.get("schema", SCHEMA) != SCHEMA:
        return f"its form is number {value['schema']}, and this version reads {SCHEMA}; what saved it reads it"
    try:
        return codec.decode(Manifest, value)
    except ConfigError as error:
        return f"its manifest is not one: {error.problems[0]}"


def seal(folder: Path) -> None:
    """`folder` is committed: the marker names the manifest it belongs to."""
    write_durably(folder / COMMITTED, digest_of(folder / MANIFEST))


def is_sealed(folder: Path) -> bool:
    """`folder` has a marker, and it is of the manifest that is there."""
    try:
        return (folder / COMMITTED).read_bytes() == digest_of(folder / MANIFEST).encode()
    except OSError:
        return False


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    """The file holds `text` and survives a power cut."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
