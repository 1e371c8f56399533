"""The words of other trainers for the keys of a short model file, so that one of them is answered with ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from meshwright.spec.errors import ConfigError, Problem

# Of each key what it is, and what Hugging Face, Megatron-LM, torchtitan and papers call it.
_KEYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "layers": (
        "the number of layers",
        ("num_layers", "num_hidden_layers", "n_layers", "n_layer", "decoder_layers", "depth"),
    ),
    "width": (
        "the hidden size",
        ("hidden_size", "d_model", "n_embd", "dim", "model_dim", "embed_dim", "embedding_size", "hidden_dim"),
    ),
    "heads": (
        "the number of attention heads",
        ("num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads"),
    ),
    "hidden": (
        "the width of the feed-forward",
        (
            *("intermediate_size", "ffn_hidden_size", "ffn", "ffn_size", "ffn_dim", "ffn_hidden", "ffn_width"),
            *("feed_forward", "d_ff", "n_inner", "mlp", "mlp_dim", "mlp_hidden_size"),
        ),
    ),
    "vocab": ("the number of tokens in the vocabulary", ("vocab_size", "padded_vocab_size", "n_vocab", "vocabulary")),
    "kv_heads": (
        "the number of key-value heads",
        ("num_key_value_heads", "num_query_groups", "n_kv_heads", "num_kv_heads", "key_value_heads"),
    ),
    "head_dim": ("the width of one head", ("kv_channels", "head_size", "d_head", "d_kv")),
    "max_positions": (
        "the longest sequence it is made for",
        (
            *("max_position_embeddings", "seq_length", "sequence_length", "seq_len", "max_seq_len"),
            *("context_length", "n_ctx", "n_positions", "block_size"),
        ),
    ),
    "theta": ("the base of rotary positions", ("rope_theta", "rotary_base", "rope_base")),
    "scaling": ("how rotary frequencies are stretched", ("rope_scaling", "rope_parameters")),
    "tied": (
        "whether the head is the embedding's matrix",
        ("tie_word_embeddings", "weight_tying", "tie_embeddings", "untie_embeddings_and_output_weights"),
    ),
    "eps": (
        "the epsilon of norms",
        ("rms_norm_eps", "norm_epsilon", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "layernorm_epsilon"),
    ),
    "activation": ("what is between the feed-forward's matrices", ("hidden_act", "activation_function", "act")),
    "bias": ("whether products have biases", ("add_bias_linear", "attention_bias", "mlp_bias", "use_bias")),
    "rotary_fraction": (
        "the share of a head with rotary positions",
        ("rotary_percent", "rotary_pct", "partial_rotary_factor"),
    ),
}
_SAME = {"max_positions": "positions"}  # what a kind without learned positions calls otherwise
_OURS = {word: key for key, (_, words) in _KEYS.items() for word in words}
_EXPERTS = ("experts", "num_experts", "n_experts", "num_local_experts", "n_routed_experts", "top_k", "moe_router_topk")
_IN_FULL = "experts are in a Hugging Face config.json, or in a file in full: docs/model_file.md"


def answered(error: ConfigError, kind: type, values: Mapping[str, Any]) -> ConfigError:
    """`error` of the short form `kind` that `values` do not say, with our key beside every word of another trainer;
    what is missing because it was called otherwise is not told twice, and what else is missing is told with what it
    is."""
    problems = [replace(each, where="") if each.where == kind.__name__ else each for each in error.problems]
    return ConfigError(_answered(problems, {field.name for field in fields(kind)}, values))


def _answered(problems: Sequence[Problem], known: set[str], values: Mapping[str, Any]) -> Iterator[Problem]:
    keys = {word: key for word in values if word not in known and (key := _key(word, known))}
    for problem in problems:
        missing = problem.what.partition("' is missing")[0].removeprefix("'")
        if problem.where in keys:
            yield replace(problem, fix=_fix(keys[problem.where], values))
        elif problem.where not in known and problem.where.lower() in _EXPERTS:
            yield replace(problem, fix=_IN_FULL)
        elif problem.where or missing not in _KEYS:
            yield problem
        elif missing not in keys.values():
            what, words = _KEYS[missing]
            yield replace(problem, fix=f"give {what}, elsewhere {words[0]}")


def _key(word: str, known: set[str]) -> str | None:
    """The key of a short form whose keys are `known` for the word of another trainer."""
    key = _OURS.get(word.lower().lstrip("-").replace("-", "_"), "")
    return next((each for each in (key, _SAME.get(key, "")) if each in known), None)


def _fix(key: str, values: Mapping[str, Any]) -> str:
    what = next(what for ours, (what, _) in _KEYS.items() if key in (ours, _SAME.get(ours)))
    return f"leave it out: {key!r} is {what}" if key in values else f"did you mean {key!r}, {what}?"
