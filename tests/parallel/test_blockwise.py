"""Blockwise attention in every precision is what torch's own attention gives, and what it keeps is little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.cost.token_layouts import document_starts, first_keys
from meshwright.parallel import kernels_compat
from meshwright.parallel.blockwise import BlockwiseAttention, Meeting, pieces
from meshwright.parallel.kernels_compat import KERNELS
from meshwright.parallel.tiles import seen_runs, tiles
from meshwright.parallel.travel import Ring

LENGTH = 600  # more keys than processors attend in fp32 where they are given half precision
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def meeting(*, window: int | None, cut: int | None) -> tuple[Meeting, Tensor]:
    """One rank that meets itself, and the mask (queries, keys) that it follows."""
    positions = np.arange(LENGTH)
    starts = None if cut is None else document_starts((positions >= cut).astype(int))
    first = first_keys(positions, window=window, starts=starts)
    found = pieces(tiles(*seen_runs(positions, first=first, last=positions)), device=torch.device("cpu"))
    mask = (positions[None] <= positions[:, None]) & (positions[None] >= first[:, None])
    travel = Ring(group=None, rank=0, size=1)
    return Meeting(travel=travel, tilings=[[(slice(None), found)]], scale=0.3), torch.from_numpy(mask)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("window", "cut"), [(None, None), (300, None), (None, 211)])
def test_outputs_and_gradients_are_those_of_torch(dtype: torch.dtype, window: int | None, cut: int | None) -> None:
    generator = torch.Generator().manual_seed(7)
    exact = [torch.randn(2, heads, LENGTH, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    given = [x.to(dtype).requires_grad_() for x in exact]
    reference = [x.detach().double().requires_grad_() for x in given]
    met, mask = meeting(window=window, cut=cut)
    out = BlockwiseAttention.apply(*given, None, met)
    wanted = functional.scaled_dot_product_attention(*reference, attn_mask=mask, scale=0.3, enable_gqa=True)
    gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    out.backward(gradient)
    wanted.backward(gradient.double())
    assert out.dtype is dtype
    pairs = [(out, wanted), *((x.grad, y.grad) for x, y in zip(given, reference, strict=True))]
    for found, expected in pairs:
        error = (found.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max()
        assert float(error) < CLOSE[dtype]


def test_a_ring_computes_while_blocks_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next keys are sent before the scores of the last are begun, and their gradients while the next are."""
    told: list[str] = []

    def started(_ring: Ring, block: Tensor, *, tag: int) -> Told:
        told.append("keys leave" if tag == 1 else "gradients leave")
        return Told(block=block, told=told, what="keys" if tag == 1 else "gradients")

    monkeypatch.setattr(Ring, "hop", started)
    met, _ = meeting(window=None, cut=None)
    three = Meeting(travel=Ring(group=None, rank=0, size=3), tilings=met.tilings * 3, scale=0.3)
    q, k, v = (torch.randn(1, 2, LENGTH, 8, requires_grad=True) for _ in range(3))
    entries = (
        replace(
            entry,
            forward=watched(entry.forward, told, "scores"),
            backward=watched(entry.backward, told, "slopes"),
        )
        for entry in KERNELS
    )
    monkeypatch.setattr(kernels_compat, "KERNELS", tuple(entries))
    out = BlockwiseAttention.apply(q, k, v, None, three)
    assert told == ["keys leave", "scores", "keys come", "keys leave", "scores", "keys come", "scores"]
    told.clear()
    out.sum().backward()
    assert told == [
        *("keys leave", "slopes", "keys come"),
        *("keys leave", "slopes", "gradients leave", "keys come"),
        *("slopes", "gradients come", "gradients leave", "gradients come"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A block that comes at once, and says when it is waited for."""

    block: Tensor
    told: list[str]
    what: str

    def wait(self) -> Tensor:
        self.told.append(f"{self.what} come")
        return self.block


def watched(function: Callable[..., object], told: list[str], word: str) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        told.append(word)
        return function(*arguments)

    return call
