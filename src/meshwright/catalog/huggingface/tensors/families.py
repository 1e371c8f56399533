"""Which family stores its tensors how, and what of a config would make its logits others than ours: refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from meshwright.catalog.huggingface.families import FAMILIES, text_of
from meshwright.catalog.huggingface.tensors.decoder import Style, decoder_table
from meshwright.catalog.huggingface.tensors.feed_forward import ExpertNames, Stored
from meshwright.catalog.huggingface.tensors.gemma4 import gemma4_table
from meshwright.catalog.huggingface.tensors.gpt2 import gpt2_table
from meshwright.catalog.huggingface.tensors.pieces import Table
from meshwright.spec.blocks import Attention, LatentAttention
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.model import ModelSpec

STRETCHES = ("llama3", "yarn", "linear")

_SWITCHED = ("w1", "w3", "w2")
_MIXTRAL = Style(mixture="block_sparse_moe", experts=ExpertNames(each=_SWITCHED))
_GPT_OSS = Style(experts=ExpertNames(stored=Stored.ALTERNATING, router="router"))
_LLAMA4 = Style(
    transform="feed_forward",
    mixture="feed_forward",
    experts=ExpertNames(stored=Stored.HALVES, router="router", shared="shared_expert"),
    planes=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a family stores a model. `fixed` are keys that change its arithmetic, and the one value that is ours."""

    table: Callable[[ModelSpec], Table]
    fixed: tuple[tuple[str, Any], ...] = ()
    rotary: bool = True


def _deepseek(model: ModelSpec) -> Table:
    further = rf"model\.layers\.{len(model.layers)}\..*"
    return decoder_table(model, Style(planes=True, rest=(further, r".*\.self_attn\.indexer\..*")))


def _llama4(model: ModelSpec) -> Table:
    towers = (r"vision_model\..*", r"multi_modal_projector\..*")
    return decoder_table(model, _LLAMA4).within("language_model.", rest=towers)


def _gemma4(model: ModelSpec) -> Table:
    towers = (r"model\.vision_tower\..*", r"model\.embed_vision\..*")
    return gemma4_table(model, root="model.language_model.", rest=towers)


def _as_llama(**fixed: Any) -> Storage:
    return Storage(table=partial(decoder_table, style=Style()), fixed=tuple(fixed.items()))


def _in(style: Style, **fixed: Any) -> Storage:
    return Storage(table=partial(decoder_table, style=style), fixed=tuple(fixed.items()))


_LATENT = Storage(
    table=_deepseek,
    fixed=(
        ("rope_interleave", True),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
    ),
)

_CAUSAL_TEXT = (("use_bidirectional_attention", "vision"),)

STORED: Mapping[str, Storage] = MappingProxyType(
    {
        "llama": _as_llama(),
        "mistral": _as_llama(),
        "phi3": _in(Style(fused=True)),
        "qwen2": _as_llama(),
        "qwen3": _as_llama(),
        "olmo2": _as_llama(),
        "olmo3": _as_llama(),
        "gemma2": _in(Style(norm_offset=1.0), use_bidirectional_attention=False),
        "gemma4": Storage(table=_gemma4, fixed=_CAUSAL_TEXT),
        "gemma4_text": Storage(table=gemma4_table, fixed=_CAUSAL_TEXT),
        "gpt2": Storage(
            table=gpt2_table,
            fixed=(
                ("scale_attn_weights", True),
                ("scale_attn_by_inverse_layer_idx", False),
                ("add_cross_attention", False),
            ),
            rotary=False,
        ),
        "mixtral": _in(_MIXTRAL),
        "qwen3_moe": _as_llama(norm_topk_prob=True),
        "gpt_oss": _in(_GPT_OSS, swiglu_limit=7.0, swiglu_alpha=1.702),
        "llama4": Storage(table=_llama4),
        "llama4_text": _in(_LLAMA4),
        "deepseek_v3": _LATENT,
        "deepseek_v32": _LATENT,
        "kimi_k2": _LATENT,
        "glm_moe_dsa": _LATENT,
    }
)
REQUIRED = MappingProxyType({"qwen3_moe": ("norm_topk_prob",)})  # keys whose default is not the value that is ours


def tensors(config: Mapping[str, Any], model: ModelSpec) -> Table:
    """Every tensor of the folder whose config.json this is, and the parameter of `model`, read from it, that it holds.

    Raises ConfigError with everything for which the logits of the two would differ, or that has no table.
    """
    problems = unconvertible(config, model)
    if problems:
        raise ConfigError(problems)
    return STORED[config["model_type"]].table(model)


def unconvertible(config: Mapping[str, Any], model: ModelSpec) -> tuple[Problem, ...]:
    """Why weights of this config cannot be taken over; () when they can."""
    kind, problems = str(config.get("model_type")), []
    lacking = _lacks(kind)
    if lacking or kind not in STORED:
        known = ", ".join(sorted(name for name in STORED if not _lacks(name)))
        why = f"not built here: {lacking}" if lacking else ""
        problems.append(
            Problem(
                what=f"weights of {kind} cannot be converted yet",
                where="config.json: model_type",
                why=why,
                fix=f"its plans can be priced; convert {known}",
            )
        )
    if config.get("quantization_config"):
        method = config["quantization_config"]
        told = method.get("quant_method") if isinstance(method, Mapping) else method
        what = f"the weights are quantised ({told})"
        fix = "convert a folder of bf16 or fp32 weights and no quantization_config"
        problems.append(Problem(what=what, where="config.json: quantization_config", fix=fix))
    storage = STORED.get(kind)
    if storage is not None:
        problems += _odd_values(text_of(config), kind, storage)
    problems += _odd_stretches(model)
    return tuple(problems)


def _lacks(kind: str) -> str:
    """What the arithmetic of this family has and ours does not, in words."""
    family = FAMILIES.get(kind)
    return "" if family is None or family.same_logits else family.lacks


def _odd_values(config: Mapping[str, Any], kind: str, storage: Storage) -> list[Problem]:
    problems = []
    for key, ours in storage.fixed:
        value = config.get(key)
        missing = value is None and key in REQUIRED.get(kind, ())
        if missing or (value is not None and value != ours):
            what = "is missing" if value is None else f"{value!r} is arithmetic that is not built here"
            problems.append(Problem(what=what, where=f"config.json: {key}", fix=f"only {ours!r} can be converted"))
    if storage.rotary and not _says_base(config) and not _says_base(config.get("rope_parameters")):
        why = "its default differs from one family to the next"
        problems.append(Problem(what="is missing", where="config.json: rope_theta", why=why, fix="say it"))
    return problems


def _says_base(values: Any) -> bool:
    """Whether the base of rotary frequencies is said here, or of each kind of layer."""
    if not isinstance(values, Mapping):
        return False
    by_layer = [entry for entry in values.values() if isinstance(entry, Mapping) and "rope_theta" in entry]
    return values.get("rope_theta") is not None or bool(by_layer)


def _odd_stretches(model: ModelSpec) -> list[Problem]:
    """Kinds of stretched rotary frequencies that are priced and not built."""
    mixers = (layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention | LatentAttention))
    scalings = (mixer.rotary.scaling for mixer in mixers if mixer.rotary)
    kinds = dict.fromkeys(scaling.kind for scaling in scalings if scaling)
    return [
        Problem(
            what=f"rotary frequencies stretched by {kind!r} are not built here",
            where="config.json: rope_scaling",
            fix=f"only {', '.join(STRETCHES)} can be converted",
        )
        for kind in kinds
        if kind not in STRETCHES
    ]
