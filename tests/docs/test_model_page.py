"""The page of the model file names every key with its default, and its examples are the files beside it."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

import pytest

from meshwright import catalog
from meshwright.catalog.decoders.shapes import GptStyle, LlamaStyle
from meshwright.spec.model import (
    Attention,
    Embedding,
    FeedForward,
    Head,
    Indexer,
    LatentAttention,
    Layer,
    MatrixRank,
    Mixture,
    ModelSpec,
    Norm,
    Recurrence,
    Rotary,
    RotaryScaling,
    Routing,
    Temperature,
    Tower,
)
from tests.docs.page import ROOT, page, shows, unnamed

PAGE = page("model_file.md")
EXAMPLES = sorted((ROOT / "examples" / "models").glob("*.toml"))
TABLES = re.findall(r"^\| key .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
ROWS = [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()] for table in TABLES]
KINDS = [
    *(LlamaStyle, GptStyle, ModelSpec, Embedding, Head, Layer, Norm, Attention, LatentAttention, Recurrence),
    *(FeedForward, Mixture, Routing, Rotary, RotaryScaling),
]


def shown(default: Any) -> str:
    """A default as the page writes it."""
    if default is MISSING:
        return ""
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if is_dataclass(default):
        return "as below"
    if isinstance(default, Enum | str):
        return f"`{default}`" if default else "empty"
    return f"{default:.15g}"


def test_every_key_of_every_table_is_on_the_page_with_its_default() -> None:
    assert len(ROWS) == len(KINDS)
    for kind, rows in zip(KINDS, ROWS, strict=True):
        assert [(row[0], row[2]) for row in rows] == [
            (f"`{field.name}`", shown(field.default)) for field in fields(kind)
        ], kind


@pytest.mark.parametrize("kind", [Indexer, MatrixRank, Temperature, Tower])
def test_keys_of_small_tables_are_on_the_page(kind: type) -> None:
    assert unnamed(kind, PAGE) == []


def test_the_examples_of_the_page_are_the_files() -> None:
    assert shows(PAGE, EXAMPLES)


def test_the_examples_say_what_the_page_says() -> None:
    found = {path.stem: catalog.load_model(path) for path in EXAMPLES}
    assert found["llama"].head.tied
    assert found["gpt"].embedding.positions == 512
    assert found["stretched"].max_positions == 4 * 8192
    assert [layer.transform.kind if layer.transform else "" for layer in found["mixture"].layers] == [
        "feed_forward",
        "mixture",
    ]
