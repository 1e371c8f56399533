"""Small modules that nobody annotated, with the names and the forwards that users write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, HEADS, HIDDEN, LAYERS, LENGTH = 48, 16, 4, 24, 2, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A module, what it takes of 8 sequences, and the targets of its logits."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: Tensor

    def loss(self, module: nn.Module, start: int, stop: int) -> Tensor:
        logits = module(*(x[start:stop] for x in self.inputs))
        return functional.cross_entropy(logits.flatten(0, 1), self.targets[start:stop].flatten())


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def repeated(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


class LlamaAttention(nn.Module):
    def __init__(self, *, kv_heads: int, bias: bool = False, norms: bool = False) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.groups = HEADS // kv_heads
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.k_proj = nn.Linear(WIDTH, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(WIDTH, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm = RMSNorm(self.head_dim) if norms else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if norms else nn.Identity()

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = rotated(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), *turns)
        k = rotated(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), *turns)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        scores = torch.matmul(q, repeated(k, self.groups).transpose(2, 3)) * self.head_dim**-0.5 + mask
        weights = functional.softmax(scores, dim=-1).to(q.dtype)
        mixed = torch.matmul(weights, repeated(v, self.groups)).transpose(1, 2).contiguous()
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1).contiguous())


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtralExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class MixtralMoe(nn.Module):
    """Two experts a token; which tokens an expert has is known from the data alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([MixtralExpert() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = torch.topk(functional.softmax(self.gate(flat), dim=1), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        result = torch.zeros_like(flat)
        mask = functional.one_hot(chosen, num_classes=4).permute(2, 1, 0)
        for index in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = self.experts[int(index)]
            place, token = torch.where(mask[index].squeeze(0))
            mixed = expert(flat[None, token].reshape(-1, x.shape[-1])) * weights[token, place, None]
            result.index_add_(0, token, mixed)
        return result.reshape(x.shape)


class LlamaLayer(nn.Module):
    def __init__(self, mlp: nn.Module, **attention: Any) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(**attention)
        self.mlp = mlp
        self.input_layernorm = RMSNorm(WIDTH)
        self.post_attention_layernorm = RMSNorm(WIDTH)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, *, mixture: bool = False, tied: bool = False, **attention: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        mlps = [MixtralMoe() if mixture else LlamaMLP() for _ in range(LAYERS)]
        self.layers = nn.ModuleList([LlamaLayer(mlp, **attention) for mlp in mlps])
        self.norm = RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        frequencies = 1.0 / 100 ** (torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed_tokens(tokens)
        angles = torch.arange(length, device=x.device)[:, None] * self.get_buffer("frequencies")[None]
        angles = torch.cat((angles, angles), dim=-1).to(x.dtype)
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)[None, None]
        for layer in self.layers:
            x = layer(x, (angles.cos(), angles.sin()), mask)
        return self.lm_head(self.norm(x))


class Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as GPT-2 was released."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.2)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(out)


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.Module()
        self.attn.c_attn, self.attn.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.mlp = nn.Module()
        self.mlp.c_fc, self.mlp.c_proj = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.attn.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (y.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        past = torch.tril(torch.ones(length, length, device=x.device)).view(1, 1, length, length)
        weights = functional.softmax(scores.masked_fill(past == 0, float("-inf")), dim=-1)
        mixed = (weights @ v).transpose(1, 2).contiguous().view(batch, length, width)
        x = x + self.attn.c_proj(mixed)
        return x + self.mlp.c_proj(functional.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        self.h = nn.ModuleList([GptBlock() for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class T5Attention(nn.Module):
    def __init__(self, *, biased: bool = False) -> None:
        super().__init__()
        self.n_heads, self.inner = HEADS, 4 * HEADS
        self.q, self.k = nn.Linear(WIDTH, self.inner, bias=False), nn.Linear(WIDTH, self.inner, bias=False)
        self.v, self.o = nn.Linear(WIDTH, self.inner, bias=False), nn.Linear(self.inner, WIDTH, bias=False)
        if biased:
            self.relative_attention_bias = nn.Embedding(2 * LENGTH, HEADS)

    def forward(self, x: Tensor, other: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        def heads(y: Tensor) -> Tensor:
            return y.view(y.shape[0], -1, self.n_heads, self.inner // self.n_heads).transpose(1, 2)

        if bias is None and hasattr(self, "relative_attention_bias"):
            places = torch.arange(x.shape[1], device=x.device)
            apart = places[None, :] - places[:, None] + LENGTH
            bias = self.relative_attention_bias(apart).permute([2, 0, 1]).unsqueeze(0)
        scores = torch.matmul(heads(self.q(x)), heads(self.k(other)).transpose(3, 2))
        scores = scores if bias is None else scores + bias
        mixed = torch.matmul(functional.softmax(scores, dim=-1), heads(self.v(other)))
        return self.o(mixed.transpose(1, 2).contiguous().view(x.shape[0], -1, self.inner)), bias


class T5Block(nn.Module):
    def __init__(self, *, biased: bool, crossed: bool) -> None:
        super().__init__()
        self.SelfAttention = T5Attention(biased=biased)
        self.EncDecAttention = T5Attention() if crossed else None
        self.wi, self.wo = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.layer_norm = RMSNorm(WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
        normed = self.layer_norm(x)
        mixed, bias = self.SelfAttention(normed, normed, bias)
        x = x + mixed
        if self.EncDecAttention is not None and other is not None:
            x = x + self.EncDecAttention(self.layer_norm(x), other, None)[0]
        return x + self.wo(functional.relu(self.wi(self.layer_norm(x)))), bias


class T5Stack(nn.Module):
    def __init__(self, *, crossed: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList([T5Block(biased=index == 0, crossed=crossed) for index in range(LAYERS)])
        self.final_layer_norm = RMSNorm(WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        bias = None
        for block in self.block:
            x, bias = block(x, bias, other)
        return self.final_layer_norm(x)


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH)
        self.encoder, self.decoder = T5Stack(crossed=False), T5Stack(crossed=True)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, tokens: Tensor, decoded: Tensor) -> Tensor:
        other = self.encoder(self.shared(tokens))
        return self.lm_head(self.decoder(self.shared(decoded), other))


class Encoder(nn.Module):
    """A plain nn.TransformerEncoder over numbers, with a mask of what is padded."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        return self.out(self.encoder(x, src_key_padding_mask=padded))


def case(kind: str) -> Case:
    """The module called `kind` in float64 with weights that every call gives alike."""
    torch.manual_seed(5)
    tokens, targets = torch.randint(0, VOCAB, (8, LENGTH)), torch.randint(0, VOCAB, (8, LENGTH))
    makers = {
        "llama": lambda: Llama(kv_heads=2),
        "qwen": lambda: Llama(kv_heads=2, bias=True, norms=True, tied=True),
        "mixtral": lambda: Llama(kv_heads=4, mixture=True),
        "gpt2": Gpt2,
        "t5": T5,
        "encoder": Encoder,
    }
    module = makers[kind]().double()
    inputs: tuple[Tensor, ...] = (tokens, targets) if kind == "t5" else (tokens,)
    if kind == "encoder":
        padded = torch.arange(LENGTH)[None] >= torch.randint(4, LENGTH + 1, (8, 1))
        inputs, targets = (torch.randn(8, LENGTH, WIDTH).double(), padded), targets % 12
    return Case(module=module, inputs=inputs, targets=targets)
