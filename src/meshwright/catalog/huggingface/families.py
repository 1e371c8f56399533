"""Which reader reads which `model_type`, and what of a family a ModelSpec does not carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from meshwright.catalog.huggingface import dense, gemma, latent, mixture
from meshwright.catalog.huggingface.reader import Reader
from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.model import ModelSpec


class Build(Protocol):
    def __call__(self, reader: Reader, *, name: str, source: str) -> ModelSpec:
        """The model that the config says; problems are noted in `reader`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one `model_type` is read.

    `lacks` says what of its arithmetic the spec leaves out; dimensions and counts are exact. `same_logits` when
    none of that changes the logits. `needs` are keys that other families may leave out, since their default
    differs from one family to the next.
    """

    build: Build
    lacks: str = ""
    same_logits: bool = False
    needs: tuple[str, ...] = ()


_FURTHER = "layers that predict further tokens"
_KV, _HEADS = ("num_key_value_heads",), ("num_key_value_heads", "head_dim")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(build=dense.llama),
        "mistral": Family(build=dense.mistral, needs=_KV),
        "phi3": Family(build=dense.mistral),
        "qwen2": Family(build=dense.qwen2, needs=_KV),
        "qwen3": Family(build=dense.qwen3, needs=_HEADS),
        "olmo2": Family(build=dense.olmo2),
        "olmo3": Family(build=dense.olmo3),
        "gemma2": Family(build=dense.gemma2, needs=_HEADS),
        "gpt2": Family(build=dense.gpt2),
        "mixtral": Family(build=mixture.mixtral, needs=_KV),
        "qwen3_moe": Family(build=mixture.qwen3_moe, needs=_KV),
        "gpt_oss": Family(build=mixture.gpt_oss, needs=_HEADS),
        "llama4": Family(build=mixture.llama4, needs=_HEADS),
        "llama4_text": Family(build=mixture.llama4, needs=_HEADS),
        "deepseek_v3": Family(build=latent.deepseek, lacks=_FURTHER, same_logits=True),
        "deepseek_v32": Family(build=latent.deepseek, lacks=_FURTHER, same_logits=True),
        "kimi_k2": Family(build=latent.deepseek, lacks=_FURTHER, same_logits=True),
        "glm_moe_dsa": Family(build=latent.deepseek, lacks=_FURTHER, same_logits=True),
        "gemma4": Family(build=gemma.gemma4, needs=_HEADS),
        "gemma4_text": Family(build=gemma.gemma4, needs=_HEADS),
    }
)


def model_from_config(config: Mapping[str, Any], *, name: str, source: str = "config.json") -> ModelSpec:
    """The model that a Hugging Face config says, parameter counts exact to the last one.

    Raises ConfigError for a `model_type` that is not known, naming those that are, and for every key that is missing
    or odd, all at once.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = f"model_type {kind!r} is not supported" if kind is not None else "is missing"
        fix = f"one of {', '.join(sorted(FAMILIES))}" if kind is None else _fix(str(kind))
        raise ConfigError(Problem(what=what, where="model_type", fix=fix))
    family = FAMILIES[kind]
    reader = Reader(config)
    told = f"{source}; not carried: {family.lacks}" if family.lacks else source
    text = Reader(text_of(config), where="text_config" if "text_config" in config else "", problems=reader.problems)
    for key in family.needs:
        if not text.has(key):
            text.note(key, "is missing")
    model = family.build(reader, name=name, source=told)
    reader.finish()
    return model


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of the language model: the part of its own that a model with towers gives it, or all."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _fix(kind: str) -> str:
    near = nearest(kind, FAMILIES)
    known = f"supported: {', '.join(sorted(FAMILIES))}"
    return f"{near} {known}" if near.startswith("did you mean") else known
