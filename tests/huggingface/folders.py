"""Folders in the Hugging Face form, of weights that are made by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.train.huggingface.files import DTYPES, write_file
from tests.huggingface.cases import weights

Shapes = Mapping[str, Sequence[int]]


def _type(name: str, dtype: str) -> str:
    """The bias of choices is stored in fp32 in every published folder."""
    return "F32" if name.endswith("e_score_correction_bias") else dtype


def write_model(path: Path, config: Mapping[str, Any], shapes: Shapes, *, dtype: str = "F32") -> Path:
    """A folder with one file of every tensor of `shapes`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))

    exact = {name: tuple(shape) for name, shape in shapes.items()}

    def make(name: str) -> torch.Tensor:
        return torch.from_numpy(weights(name, exact[name])).to(DTYPES[_type(name, dtype)])

    announced = {name: (_type(name, dtype), shape) for name, shape in exact.items()}
    write_file(path / "model.safetensors", announced, make=make)
    return path
