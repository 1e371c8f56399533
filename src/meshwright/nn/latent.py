"""Multi-head latent attention: queries and key-values pass through low-rank latents (DeepSeek-V2, 2405.04434)."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.nn.attention import AttentionCore
from meshwright.nn.context import Context
from meshwright.nn.linear import Linear
from meshwright.nn.norm import RootMeanSquareNorm
from meshwright.nn.rotary import rotate
from meshwright.nn.weights import Weighted
from meshwright.spec.model import LatentAttention


class LatentAttentionMixer(Weighted):
    """Each head reads a part without position (from the latent) and a rotary part that all heads' keys share."""

    def __init__(self, spec: LatentAttention) -> None:
        super().__init__()
        self.spec = spec
        eps = spec.latent_eps
        query_dims = spec.heads * (spec.nope_dim + spec.rope_dim)
        if spec.query_rank is None:
            self.query = Linear(spec.width, query_dims, bias=False)
        else:
            self.query_down = Linear(spec.width, spec.query_rank, bias=False)
            self.query_norm = RootMeanSquareNorm(spec.query_rank, eps=eps)
            self.query_up = Linear(spec.query_rank, query_dims, bias=False)
        self.kv_down = Linear(spec.width, spec.kv_rank + spec.rope_dim, bias=False)
        self.kv_norm = RootMeanSquareNorm(spec.kv_rank, eps=eps)
        self.kv_up = Linear(spec.kv_rank, spec.heads * (spec.nope_dim + spec.value_dim), bias=False)
        self.core = AttentionCore(spec, head_dim=spec.nope_dim + spec.rope_dim)
        self.output = Linear(spec.heads * spec.value_dim, spec.width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(b, s, width) from normed (b, s, width)."""
        spec = self.spec
        q = self.query(x) if spec.query_rank is None else self.query_up(self.query_norm(self.query_down(x)))
        q_nope, q_rope = q.unflatten(-1, (-1, spec.nope_dim + spec.rope_dim)).split((spec.nope_dim, spec.rope_dim), -1)
        latent, k_rope = self.kv_down(x).split((spec.kv_rank, spec.rope_dim), -1)
        k_rope = k_rope.unsqueeze(2)
        up = self.kv_up(self.kv_norm(latent)).unflatten(-1, (-1, spec.nope_dim + spec.value_dim))
        k_nope, v = up.split((spec.nope_dim, spec.value_dim), -1)
        if spec.rotary is not None:
            turn = context.angles(spec.rotary, x)
            q_rope, k_rope = rotate(q_rope, turn), rotate(k_rope, turn)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
        return self.output(self.core(q, k, v, None, context).flatten(-2))
