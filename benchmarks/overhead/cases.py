"""One model trained twice, as a plan says and by the torch calls a person would write, on every rank of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from tests.parallel.parity_cases import mesh_over
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from meshwright.nn import Decoder, initialize
from meshwright.parallel import build_optimizer, lay
from meshwright.spec.blocks import Attention, FeedForward, Norm
from meshwright.spec.model import Embedding, Head, Layer, ModelSpec
from meshwright.spec.plan import Design
from meshwright.spec.positions import Rotary

WIDTH, HEADS, HIDDEN, VOCAB, LAYERS, LENGTH = 256, 8, 704, 2048, 4, 256
WARM_UP = 2
Step = Callable[[Tensor, Tensor], float]


def model() -> ModelSpec:
    """A small Llama: rotary positions, grouped queries, gated feed-forward."""
    norm = Norm(width=WIDTH)
    head_dim = WIDTH // HEADS
    mixer = Attention(
        width=WIDTH, heads=HEADS, kv_heads=HEADS // 2, head_dim=head_dim, norm=norm, rotary=Rotary(dims=head_dim)
    )
    layer = Layer(mixer=mixer, transform=FeedForward(width=WIDTH, hidden=HIDDEN, norm=norm))
    return ModelSpec(
        name="overhead",
        embedding=Embedding(vocab=VOCAB, width=WIDTH),
        layers=(layer,) * LAYERS,
        head=Head(vocab=VOCAB, width=WIDTH, norm=norm),
        max_positions=LENGTH,
        initializer_range=0.02,
    )


def both(design: Design, bare: str, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of `rounds` steps of ours and of the bare calls, in turn, after some that are not told."""
    torch.manual_seed(0)
    plan = design.plan
    rows = plan.batch // plan.data
    tokens = torch.randint(0, VOCAB, (rows, plan.sequence_length + 1))
    steps = (ours(design), BARE[bare](design))
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM_UP + rounds):
        for step, seconds in zip(steps, found, strict=True):
            dist.barrier()
            start = time.perf_counter()
            step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            dist.barrier()
            if turn >= WARM_UP:
                seconds.append(time.perf_counter() - start)
    return found


def ours(design: Design) -> Step:
    laid = lay(design, mesh_over(design), device="cpu", seed=1)
    optimizer = build_optimizer(laid, design.job.optimizer)

    def step(tokens: Tensor, targets: Tensor) -> float:
        loss = laid.step(tokens, targets)
        laid.clip(1.0)
        optimizer.step()
        return float(loss)

    return step


def sharded(design: Design) -> Step:
    """FSDP2 around every layer and the whole, each microbatch's gradients reduced."""
    whole = Decoder(design.model)
    initialize(whole, seed=1)
    mesh = init_device_mesh("cpu", (design.plan.shard,))
    for layer in whole.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-4, weight_decay=0.1)
    return _accumulating(whole, optimizer, design)


def replicated(design: Design) -> Step:
    """DistributedDataParallel."""
    whole = Decoder(design.model)
    initialize(whole, seed=1)
    wrapped = nn.parallel.DistributedDataParallel(whole)
    return _accumulating(wrapped, torch.optim.AdamW(whole.parameters(), lr=3e-4, weight_decay=0.1), design)


def divided(design: Design) -> Step:
    """Column and row styles of torch over a plain module of the same shape."""
    whole = PlainLlama(heads=HEADS // design.plan.tensor)
    mesh = init_device_mesh("cpu", (design.plan.tensor,))
    styles = {name: ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    styles |= {name: RowwiseParallel() for name in ("output", "down")}
    for layer in whole.layers:
        parallelize_module(layer, mesh, styles)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-4, weight_decay=0.1)
    return _accumulating(whole, optimizer, design)


def piped(design: Design) -> Step:
    """torch's own 1F1B over stages made by hand."""
    plan, rank, last = design.plan, dist.get_rank(), design.plan.pipeline - 1
    stage = plan.stages[rank]
    part = Decoder(design.model, start=stage.start, stop=stage.stop)
    initialize(part, seed=1)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-4, weight_decay=0.1)
    runtime = Schedule1F1B(
        PipelineStage(part, rank, plan.pipeline, torch.device("cpu")),
        n_microbatches=plan.schedule.microbatches,
        loss_fn=_loss,
        scale_grads=False,
    )

    def step(tokens: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        if rank == 0:
            runtime.step(tokens)
        elif rank == last:
            runtime.step(target=targets)
        else:
            runtime.step()
        _clip(part)
        optimizer.step()
        return 0.0

    return step


BARE: dict[str, Callable[[Design], Step]] = {
    "fully_shard": sharded,
    "DistributedDataParallel": replicated,
    "parallelize_module": divided,
    "Schedule1F1B": piped,
}


def _accumulating(whole: nn.Module, optimizer: torch.optim.Optimizer, design: Design) -> Step:
    size, count = design.plan.microbatch, design.plan.schedule.microbatches

    def step(tokens: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        total = 0.0
        for index in range(count):
            rows = slice(index * size, (index + 1) * size)
            loss = _loss(whole(tokens[rows]), targets[rows]) / count
            loss.backward()
            total += float(loss.detach())
        _clip(whole)
        optimizer.step()
        return total

    return step


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _clip(module: nn.Module) -> None:
    """By the norm of all gradients; those that are divided and those that are whole are normed and scaled apart."""
    divided = [p for p in module.parameters() if isinstance(p, DTensor)]
    alone = [p for p in module.parameters() if not isinstance(p, DTensor)]
    norms = [nn.utils.get_total_norm([p.grad for p in held if p.grad is not None]) for held in (divided, alone) if held]
    wholes = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack(wholes).square().sum().sqrt()
    for held in (divided, alone):
        if held:
            nn.utils.clip_grads_with_norm_(held, 1.0, total)


class PlainLayer(nn.Module):
    """A layer as anyone writes it, of linear modules alone; `heads` of this rank."""

    def __init__(self, *, heads: int) -> None:
        super().__init__()
        self.heads, kv = heads, WIDTH // 2
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        sizes = {"query": (WIDTH, WIDTH), "key": (WIDTH, kv), "value": (WIDTH, kv), "output": (WIDTH, WIDTH)}
        sizes |= {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        for name, (given, made) in sizes.items():
            setattr(self, name, nn.Linear(given, made, bias=False))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.attention_norm(x)
        parts = [project(normed).unflatten(-1, (-1, WIDTH // HEADS)) for project in (self.query, self.key, self.value)]
        q, k, v = (part.transpose(1, 2) for part in parts)
        q, k = (_turned(part, turn) for part in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(-2))
        normed = self.feed_forward_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class PlainLlama(nn.Module):
    def __init__(self, *, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(PlainLayer(heads=heads) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        half = WIDTH // HEADS // 2
        angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.turn = (angles.cos(), angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.turn)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def whole(design: Design) -> Design:
    """The design with the sequence length of this benchmark."""
    job = replace(design.job, sequence_length=LENGTH, batch_tokens=design.plan.batch * LENGTH)
    return replace(design, job=job, plan=replace(design.plan, sequence_length=LENGTH))
