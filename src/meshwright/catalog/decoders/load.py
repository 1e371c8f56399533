"""One way in for models: a preset's name, a Hugging Face config.json or folder, or a file of ours."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.catalog import documents
from meshwright.catalog.decoders.presets import by_spelling, presets
from meshwright.catalog.decoders.shapes import GptStyle, LlamaStyle, Shape
from meshwright.catalog.documents import Document
from meshwright.catalog.model_ranges import checked_model
from meshwright.catalog.model_words import answered
from meshwright.catalog.names import find, normal, suggest
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.model import ModelSpec, language_model
from meshwright.spec.units import format_count

LANGUAGE = ":language"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a list: a name that loads, and what it is."""

    name: str
    description: str


def load_model(name_or_path: str | Path, *, vocab: int | None = None) -> ModelSpec:
    """The model of this name or in this file; `vocab` replaces the size of its vocabulary.

    `NAME:language` is what of it can be trained here, without encoder towers and with dense attention where it is as
    good as its sparse one. Names match whatever their case and punctuation, with or without their owner
    (`meta-llama/Llama-3.1-405B`). A file is a Hugging Face config.json (or the folder that holds it), a ModelSpec, or a
    few numbers of a `llama` or `gpt` shape. Raises ConfigError.
    """
    name = str(name_or_path)
    model = _load(name.removesuffix(LANGUAGE))
    model = language_model(model) if name.endswith(LANGUAGE) else model
    return model if vocab is None else with_vocab(model, vocab=vocab)


def with_vocab(model: ModelSpec, *, vocab: int) -> ModelSpec:
    """The same model for a vocabulary of another size. Raises ConfigError when it is not positive."""
    if vocab < 1:
        raise ConfigError(Problem(what=f"a vocabulary of {vocab} is not possible", where="vocab"))
    return replace(model, embedding=replace(model.embedding, vocab=vocab), head=replace(model.head, vocab=vocab))


def models() -> tuple[Entry, ...]:
    """Every preset with its parameters and shape."""
    return tuple(Entry(name=preset.name, description=describe(preset.build())) for preset in presets())


def describe(model: ModelSpec) -> str:
    """`8.03 B parameters, 32 layers, width 4,096, vocabulary 128,256`, and the active ones where they are fewer."""
    active = model.active_parameters
    parts = [f"{format_count(model.parameters)} parameters"]
    if active < model.parameters:
        parts[0] += f" ({format_count(active)} active)"
    parts += [f"{len(model.layers)} layers", f"width {model.width:,}", f"vocabulary {model.vocab:,}"]
    return ", ".join(parts)


def _load(name: str) -> ModelSpec:
    file = Path(name)
    if file.suffix.lower() not in (".json", ".toml"):
        preset = find(name, by_spelling())
        if preset is not None:
            return preset.build()
        if not name.strip() or not os.path.exists(name):
            known = [entry.name for entry in presets()]
            fix = suggest(name, known, see="`meshwright models`, or name a config.json")
            raise ConfigError(Problem(what=f"no model is called {name!r}", where="model", fix=fix))
    if os.path.isfile(file / "config.json"):
        file = file / "config.json"
    return _read(file)


def _read(file: Path) -> ModelSpec:
    document = documents.read(file)
    values = document.values
    if "model_type" in values:
        from meshwright.catalog import huggingface

        title = _title(file, document)
        return documents.located(
            lambda: checked_model(huggingface.model_from_config(values, name=title, source=file.name)), document
        )
    if "embedding" in values:
        return documents.decode(ModelSpec, document, check=checked_model)
    if "kind" in values:
        return documents.located(lambda: _shape(document).build(), document)
    what = "is not a model"
    fix = 'a Hugging Face config has model_type, a short form has kind = "llama" or "gpt", a full one has embedding'
    raise ConfigError(Problem(what=what, where=str(file), fix=fix))


def _shape(document: Document) -> Shape:
    kinds: dict[str, type[LlamaStyle] | type[GptStyle]] = {"llama": LlamaStyle, "gpt": GptStyle}
    kind = document.values["kind"]
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(Problem(what=f"kind {kind!r} is unknown", where="kind", fix=codec.nearest(str(kind), kinds)))
    values = {"name": Path(document.name).stem, **document.values}
    try:
        return codec.decode(kinds[kind], values)
    except ConfigError as error:
        raise answered(error, kinds[kind], values) from None


def _title(file: Path, document: Document) -> str:
    told = document.values.get("_name_or_path")
    if isinstance(told, str) and told:
        return told.rsplit("/", maxsplit=1)[-1].lower()
    stem = file.name.removesuffix(".json").removesuffix(".config")
    stem = file.resolve().parent.name if normal(stem) == "config" else stem
    return stem.rsplit("--", maxsplit=1)[-1].lower()
