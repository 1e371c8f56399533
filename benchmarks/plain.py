"""The yardstick: a Llama-style model and a training loop as one would write them by hand in PyTorch.

Nothing of meshwright is imported. Run as a script it prints one JSON object with the seconds of every step.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.nn.functional as F  # noqa: N812  (the name everyone gives it)
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.norm1(x)
        q = self.query(h).view(b, s, self.heads, -1).transpose(1, 2)
        k = self.key(h).view(b, s, self.kv_heads, -1).transpose(1, 2)
        v = self.value(h).view(b, s, self.kv_heads, -1).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.output(a.transpose(1, 2).reshape(b, s, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Model(nn.Module):
    def __init__(
        self, vocab: int, width: int, layers: int, heads: int, kv_heads: int, hidden: int, s: int, tied: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        dim = width // heads
        frequency = 1.0 / 10000.0 ** (torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(s).float(), frequency)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("vocab", "width", "layers", "heads", "kv-heads", "hidden", "sequence", "batch", "microbatch", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tied", action="store_true", help="the head has the embedding's table")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes = (args.vocab, args.width, args.layers, args.heads, args.kv_heads, args.hidden, args.sequence)
    model = Model(*sizes, tied=args.tied).to(args.device)
    if args.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds, count = [], args.batch // args.microbatch
    for _ in range(args.steps):
        data = torch.randint(0, args.vocab, (args.batch, args.sequence + 1)).to(args.device)
        start, losses = time.perf_counter(), []
        for rows in data.split(args.microbatch):
            with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.precision == "bf16"):
                logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()) / count
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = float(sum(losses))  # waits until the device has done the step
        seconds.append(time.perf_counter() - start)
    most = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    count = sum(p.numel() for p in model.parameters())
    print(json.dumps({"seconds": seconds, "loss": total, "parameters": count, "allocated_bytes": most}))


if __name__ == "__main__":
    main()
