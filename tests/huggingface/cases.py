"""Small configs of every family whose weights are converted, and weights that are the same wherever they are made."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

TOKENS = (3, 17, 41, 8, 0, 29, 29, 5, 46, 12, 33, 20)
EPS = 0.02  # large, so that another one shows

_BASE = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA4 = {
    **{key: value for key, value in _BASE.items() if key not in ("hidden_act", "rope_theta")},
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "global_head_dim": 16,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 100.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
    },
}
_EXPERTS = {"num_experts_per_tok": 2}
_LATENT = {
    **{key: value for key, value in _BASE.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    **_EXPERTS,
}
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
_UNEVEN = {"original_max_position_embeddings": 64, "beta_fast": 1.2, "beta_slow": 0.5}  # ends between planes
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def configs() -> dict[str, dict[str, Any]]:
    """config.json of each case, in the form that is published."""
    windowed = {"sliding_window": 5}
    return {
        "llama": {**_BASE, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
        "llama3": {**_BASE, "model_type": "llama", "rope_scaling": _LLAMA3, "tie_word_embeddings": True},
        "llama_linear": {**_BASE, "model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        "mistral": {**_BASE, **windowed, "model_type": "mistral"},
        "phi3": {**_BASE, "model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": 64},
        "qwen2": {**_BASE, "model_type": "qwen2", "use_sliding_window": False},
        "qwen3": {**_BASE, "model_type": "qwen3", "attention_bias": False},
        "olmo2": {**_BASE, "model_type": "olmo2"},
        "olmo3": {
            **_BASE,
            **windowed,
            "model_type": "olmo3",
            "rope_theta": 500000.0,
            "rope_scaling": {**_YARN, "attention_factor": 1.2},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "gemma2": {
            **_BASE,
            **windowed,
            "model_type": "gemma2",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "gemma4": {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        "gemma4_dense": {**_GEMMA4, "attention_bias": True, "final_logit_softcapping": None},
        "gpt2": {
            "model_type": "gpt2",
            "vocab_size": 48,
            "n_embd": 16,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 64,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": EPS,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "mixtral": {**_BASE, **_EXPERTS, "model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
        "qwen3_moe": {
            **_BASE,
            **_EXPERTS,
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
        },
        "gpt_oss": {
            **_BASE,
            **_EXPERTS,
            **windowed,
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {**_YARN, **_UNEVEN, "truncate": False},
        },
        "llama4": {
            **_BASE,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 20,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 5,
            "floor_scale": 3,
            "attn_scale": 0.4,
            "rope_scaling": {**_LLAMA3, "high_freq_factor": 1.0},
        },
        "glm_moe_dsa": {
            **_LATENT,
            "model_type": "glm_moe_dsa",
            "rms_norm_eps": EPS,
            "rope_interleave": True,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 16,
        },
        "deepseek_v3": {**_LATENT, **_GROUPS, "model_type": "deepseek_v3", "rope_interleave": True},
        "deepseek_v3_yarn": {
            **_LATENT,
            "model_type": "deepseek_v3",
            "rope_interleave": True,
            "q_lora_rank": None,
            "rope_scaling": {**_YARN, "mscale": 0.8, "mscale_all_dim": 1.1},
        },
    }


def weights(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Values of a stored tensor, by its name: large enough that clamps and caps are reached, the same everywhere.

    Stacked experts are larger still: their gate is clamped far out.
    """
    draw = np.random.RandomState(zlib.crc32(name.encode()))
    spread = 1.0 if len(shape) in (1, 3) else 2.0 / np.sqrt(shape[-1])
    return np.asarray(draw.standard_normal(shape) * spread, dtype=np.float32)
