"""What a stack's selective recompute runs again, by what of a layer it drops."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Repeated(StrEnum):
    """What forward made and backward makes again, no two of them of the same tensors."""

    SCORES = "what lies between the inputs of attention's scores and their output"
    CONTEXT = "what attention gives its last product"
    LATENTS = "queries, keys and values that latent attention makes of its latents"
    NORMED = "what a norm gives that is a kernel of its own"
    NORMED_INSIDE = "what a norm gives that is one kernel with the product behind it"
    DENSE = "what the first products of a feed-forward give"
    ACTIVATED = "what a feed-forward's activation gives"
    EXPERTS = "tokens sent to experts, and what their first products give"
    EXPERTS_ACTIVATED = "what the experts' activation gives"
    SHARED = "all that a shared expert keeps inside"
    SECOND_PRODUCTS = "all but what attention, every second product and the exchange of tokens give"


SCORES = frozenset({Repeated.SCORES})
OPERATORS = frozenset({Repeated.SECOND_PRODUCTS})
# Megatron-Core's recompute_modules (core/transformer/transformer_config.py), by what each drops there. Norms of
# attention and of dense feed-forwards are one kernel with the products behind them, and not in its reach.
MODULES: Mapping[str, frozenset[Repeated]] = MappingProxyType(
    {
        "core_attn": SCORES,
        "mla_up_proj": frozenset({Repeated.LATENTS}),
        "layernorm": frozenset({Repeated.NORMED}),
        "moe_act": frozenset({Repeated.EXPERTS_ACTIVATED}),
        "mlp": frozenset({Repeated.DENSE, Repeated.ACTIVATED}),
        "moe": frozenset({Repeated.EXPERTS, Repeated.EXPERTS_ACTIVATED, Repeated.SHARED}),
        "shared_experts": frozenset({Repeated.SHARED}),
    }
)
_NORMS = frozenset({Repeated.NORMED, Repeated.NORMED_INSIDE})
# MaxText's remat_policy `minimal` keeps what products give, and save_dot_with_context_except_mlp what attention and its
# products do (layers/decoders.py, get_remat_policy); XLA keeps nothing else but what enters a layer.
PRODUCTS_KEPT = _NORMS | SCORES | {Repeated.CONTEXT, Repeated.ACTIVATED, Repeated.EXPERTS_ACTIVATED}
ATTENTION_KEPT = _NORMS | MODULES["mlp"] | MODULES["moe"]
