"""Text from a whole decoder, one token at a time, with remembered keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.nn.context import Context, GrowingMemory
from meshwright.nn.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`temperature` 0 takes the likeliest token; `top_k` None keeps all."""

    temperature: float = 0.8
    top_k: int | None = 50
    seed: int = 0


@torch.no_grad()
def generate(decoder: Decoder, prompt: list[int], *, count: int, sampling: Sampling = Sampling()) -> Iterator[int]:
    """Yields `count` tokens after `prompt`, which holds at least one.

    Keys and values are remembered up to the longest sequence that the model reads; beyond, the second half of what was
    read is read again and the sequence goes on from there. Under a prefix mask what is left of the prompt sees all of
    it.
    """
    device = next(decoder.parameters()).device
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    limit = max(decoder.model.most_positions, 2)
    read = prompt[-limit:]
    asked = len(read)
    context, fresh = _reading(read, prompt=asked, device=device), read
    for _ in range(count):
        if context.start + len(fresh) > limit:
            asked = max(0, asked + limit // 2 - len(read))
            read = read[-(limit // 2) :]
            context, fresh = _reading(read, prompt=asked, device=device), read
        logits = decoder(torch.tensor([fresh], device=device), context=context)[0, -1].float()
        token = _choose(logits, sampling, generator)
        context = Context(memory=context.memory, start=context.start + len(fresh))
        fresh = [token]
        read = [*read, token]
        yield token


def _reading(read: list[int], *, prompt: int, device: torch.device) -> Context:
    """The context of tokens that are read at once, the first `prompt` of them a prompt."""
    ahead = (prompt - 1 - torch.arange(len(read), device=device)).clamp(min=0)
    return Context(memory=GrowingMemory(), ahead=ahead[None])


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    # Of logits below their largest and in fp64 the least temperature there is leaves numbers, and takes the likeliest.
    weights = ((logits - logits.max()).double() / sampling.temperature).softmax(dim=-1)
    return int(torch.multinomial(weights, 1, generator=generator))
