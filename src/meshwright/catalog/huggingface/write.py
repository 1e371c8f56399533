"""A config.json of a model that never had one: written in each family's words until one reads back as the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.catalog.huggingface.families import model_from_config
from meshwright.catalog.huggingface.reader import ACTIVATIONS
from meshwright.catalog.huggingface.tensors import unconvertible
from meshwright.spec.blocks import Attention, FeedForward, Mixture
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.model import ModelSpec
from meshwright.spec.positions import RotaryScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def config_of(model: ModelSpec) -> dict[str, Any]:
    """A config that reads back as `model`, whatever it is called.

    Raises ConfigError when no family that is written here has words for it.
    """
    bare = replace(model, name="", source="")
    for config in _candidates(model):
        try:
            told = model_from_config(config, name="")
        except ConfigError:
            continue
        if replace(told, source="") == bare and not unconvertible(config, told):
            return config
    known = ", ".join(ARCHITECTURES)
    why = f"none of {known} has words for all of its parts"
    raise ConfigError(
        Problem(what="this model has no Hugging Face form", where=model.name, why=why, fix="--config names one")
    )


def _candidates(model: ModelSpec) -> Iterator[dict[str, Any]]:
    layer = model.layers[0]
    mixer, last = layer.mixer, model.layers[-1].transform
    if not isinstance(mixer, Attention) or last is None:
        return
    for kind, architecture in ARCHITECTURES.items():
        head = {"architectures": [architecture], "model_type": kind}
        yield {**head, **(_gpt2(model, mixer) if kind == "gpt2" else _llama(model, mixer))}


def _llama(model: ModelSpec, mixer: Attention) -> dict[str, Any]:
    norm = model.head.norm
    rotary = mixer.rotary
    config: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": norm.eps if norm else 1e-6,
        "rope_theta": rotary.theta if rotary else 10000.0,
        "rope_scaling": _stretch(rotary.scaling) if rotary and rotary.scaling else None,
        "tie_word_embeddings": model.head.tied,
        "attention_bias": mixer.output_bias,
        "initializer_range": model.initializer_range,
        "sliding_window": mixer.window,
        "use_sliding_window": mixer.window is not None,
        "max_window_layers": 0,
    }
    for layer in model.layers:
        config |= _transform(layer.transform)
    return config


def _transform(part: FeedForward | Mixture | None) -> dict[str, Any]:
    if part is None:
        return {}
    told: dict[str, Any] = {"hidden_act": _activation(part), "intermediate_size": part.hidden}
    if isinstance(part, FeedForward):
        return {**told, "mlp_bias": part.bias}
    experts = {"num_experts": part.experts, "num_local_experts": part.experts, "num_experts_per_tok": part.top_k}
    return {**told, **experts, "moe_intermediate_size": part.hidden, "norm_topk_prob": True}


def _gpt2(model: ModelSpec, mixer: Attention) -> dict[str, Any]:
    norm, part = model.head.norm, model.layers[0].transform
    return {
        "vocab_size": model.vocab,
        "n_embd": model.width,
        "n_head": mixer.heads,
        "n_layer": len(model.layers),
        "n_positions": model.max_positions,
        "n_inner": part.hidden if part else 4 * model.width,
        "activation_function": _activation(part) if part else "gelu_new",
        "layer_norm_epsilon": norm.eps if norm else 1e-5,
        "tie_word_embeddings": model.head.tied,
        "initializer_range": model.initializer_range,
    }


def _stretch(scaling: RotaryScaling) -> dict[str, Any]:
    low, high = ("beta_slow", "beta_fast") if scaling.kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    told = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        low: scaling.low_frequency,
        high: scaling.high_frequency,
        "original_max_position_embeddings": scaling.trained_positions,
    }
    if scaling.kind == "yarn":
        told |= {"truncate": scaling.truncate}
        told |= {"attention_factor": scaling.gain} if scaling.gain is not None else {}
    return told


def _activation(part: FeedForward | Mixture) -> str:
    return next((name for name, kind in ACTIVATIONS.items() if kind is part.activation), part.activation.value)
