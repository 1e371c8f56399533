"""Which reader reads which `model_type`, and what of a family a ModelSpec does not carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from meshwright.catalog.huggingface import delta, dense, encoder, gemma, latent, mixture, state_space
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
_SCALES = "the scales of the residual stream, of parts and of logits"
_BIASES = "biases of scores by relative position (counted), and decoders that read fewer tokens than encoders"
_SUMS = "norms after sums, and the products of the head's dense layer (counted)"
_NO_HEADS = "which decays every feature by itself, and the blocks here are of heads"
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
        "mamba2": Family(build=state_space.mamba2),
        "nemotron_h": Family(build=state_space.nemotron_h, lacks=_FURTHER),
        "bamba": Family(build=state_space.bamba),
        "falcon_h1": Family(build=state_space.falcon_h1, lacks=f"attention beside the state space, {_SCALES}"),
        "granitemoehybrid": Family(build=state_space.granitemoehybrid, lacks=_SCALES),
        "qwen3_next": Family(build=delta.qwen3_next, lacks=_FURTHER),
        "t5": Family(build=encoder.t5, lacks=_BIASES),
        "mt5": Family(build=encoder.t5, lacks=_BIASES, needs=("tie_word_embeddings",)),
        "bert": Family(build=encoder.bert, lacks=_SUMS),
        "roberta": Family(build=encoder.bert, lacks=_SUMS),
    }
)
# Families that are asked for and whose layers no block says.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("mamba", "falcon_mamba"), f"its layers are Mamba-1, {_NO_HEADS}"),
        "jamba": f"most of its layers are Mamba-1, {_NO_HEADS}",
        "zamba": f"its layers are Mamba-1, {_NO_HEADS}, and share the parameters of one block",
        "zamba2": "its layers share the parameters of a few blocks, and every layer of a model here has its own",
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
        raise ConfigError(Problem(what=what, where="model_type", why=REFUSED.get(str(kind), ""), fix=fix))
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
    known = f"supported: {', '.join(sorted(FAMILIES))}"
    near = "" if kind in REFUSED else nearest(kind, FAMILIES)
    return f"{near} {known}" if near.startswith("did you mean") else known
