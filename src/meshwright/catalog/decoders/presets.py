"""Models by name: shapes written here and configurations published with the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from meshwright.catalog import documents
from meshwright.catalog.decoders import gpt, llama, mpt, small
from meshwright.catalog.names import normal, spellings
from meshwright.spec.model import ModelSpec

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "Meta-Llama-3.1-8B": "llama-3.1-8b",
        "Meta-Llama-3.1-70B": "llama-3.1-70b",
        "Meta-Llama-3.1-405B": "llama-3.1-405b",
        "Llama-3.2-1B-Instruct": "llama-3.2-1b",
        "Llama-4-Scout-17B-16E-Instruct": "llama-4-scout",
        "Mistral-7B-Instruct-v0.3": "mistral-7b",
        "Mixtral-8x7B-v0.1": "mixtral-8x7b",
        "Mixtral-8x22B-v0.1": "mixtral-8x22b",
        "OLMo-2-0425-1B": "olmo-2-1b",
        "Olmo-3.1-32B-Instruct": "olmo-3.1-32b",
        "gemma-4-26B-A4B": "gemma-4-26b-a4b",
        "Kimi-K2-Instruct": "kimi-k2",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model by name; `aliases` find it too."""

    name: str
    build: Callable[[], ModelSpec]
    aliases: tuple[str, ...] = ()


@cache
def presets() -> tuple[Preset, ...]:
    """Every preset, small ones first, then by family."""
    shapes = (*small.SHAPES, *gpt.SHAPES, *mpt.SHAPES, *llama.SHAPES)
    written = [Preset(name=shape.name, build=shape.build) for shape in shapes]
    return (*written, *(_published(path) for path in sorted(CONFIGS.glob("*.config.json"))))


@cache
def by_spelling() -> Mapping[str, Preset]:
    """Presets by every normal form of their names and aliases; the first preset that claims a form keeps it."""
    found: dict[str, Preset] = {}
    for preset in presets():
        found.setdefault(normal(preset.name), preset)
    for preset in presets():
        for alias in preset.aliases:
            for form in spellings(alias):
                found.setdefault(form, preset)
    return MappingProxyType(found)


def _published(path: Path) -> Preset:
    owner, _, model = path.name.removesuffix(".config.json").partition("--")
    name = _RENAMED.get(model, model.lower())
    return Preset(name=name, build=partial(_load, path, name), aliases=(f"{owner}/{model}",))


def _load(path: Path, name: str) -> ModelSpec:
    from meshwright.catalog import huggingface

    return huggingface.model_from_config(documents.read(path).values, name=name, source=f"{path.name} (configs)")
