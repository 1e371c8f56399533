"""What attention over context ranks starts and moves is what the cost model counts, on rings that send nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import nn
from meshwright.cost.blockwise_work import TileCounts
from meshwright.cost.operators import block_work
from meshwright.cost.token_layouts import dealt
from meshwright.cost.work import Sizes
from meshwright.nn.context import Context
from meshwright.parallel.context import ContextShare, divide_sequences
from meshwright.parallel.mesh import ContextRanks
from meshwright.parallel.tiles import seen_runs, tiles
from meshwright.parallel.travel import Ring
from meshwright.spec.exchange import ExchangeKind, TokenLayout
from meshwright.spec.plan import Axis, AxisName, Plan, Schedule, ScheduleKind
from tests.nn.test_traffic import ATTENTION, BATCH, LENGTH, LOOKS, MAKES, MODEL, MORE_LOOKS, Tally, moved, tallied

FILLED = {"zeros_like", "new_zeros", "new_full"}  # written, whatever they are like
LOOKS_TOO = {"alias", "split_with_sizes", "promote_types"}


@dataclass
class Started(Tally):
    """What works was started so many times; what only looks moves nothing."""

    starts: Counter[str] = field(default_factory=Counter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if name in LOOKS_TOO:
            self.num_bytes.pop(name, None)
        elif name not in LOOKS | MORE_LOOKS | MAKES:
            self.starts[name] += 1
        if name in FILLED:
            self.num_bytes[name] -= moved(args[0])
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays:
    """A block that goes nowhere."""

    block: Tensor

    def wait(self) -> Tensor:
        return self.block


@pytest.fixture(autouse=True)
def _nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def hop(_ring: Ring, block: Tensor, *, tag: int) -> Stays:
        del tag
        return Stays(block=block)

    monkeypatch.setattr(Ring, "hop", hop)


def passes(rank: int, ranks: int, *, dtype: torch.dtype, documents: Tensor | None = None) -> tuple[Started, Started]:
    """A layer forward and backward on one of `ranks`; of one rank without any exchange."""
    decoder = nn.Decoder(MODEL).to(dtype)
    nn.initialize(decoder, seed=0)
    layer = next(iter(decoder.layers.values()))
    context = Context(documents=documents, length=LENGTH)
    if ranks > 1:
        plan = Plan(
            model=MODEL.name,
            cluster="here",
            axes=(Axis(name=AxisName.CONTEXT, size=ranks),),
            stages=(),
            schedule=Schedule(kind=ScheduleKind.ONE_F_ONE_B, microbatches=1),
            sequence_length=LENGTH,
            microbatch=BATCH,
        )
        group = cast(dist.ProcessGroup, object())
        place = ContextRanks(rank=rank, size=ranks, traders=1, inner=None, outer=group)
        share = ContextShare(plan, place, device=torch.device("cpu"))
        divide_sequences(layer, share, kind=ExchangeKind.RING)
        context.positions = share.positions(context)
    x = torch.randn(BATCH, LENGTH // ranks, MODEL.width, dtype=dtype, requires_grad=True)
    layer(x, context)
    return tallied(lambda: layer(x, context), tally=Started)


def modelled(ranks: int, dtype: torch.dtype) -> dict[str, float]:
    one, size = np.ones(1), np.array([float(dtype.itemsize)])
    sizes = Sizes(
        batch=BATCH * one,
        sequence=float(LENGTH),
        tensor=one,
        split=one,
        itemsize=size,
        context=ranks * one,
        composite_norms=True,
        eager=True,
        attention_itemsize=np.maximum(4.0, size),
    )
    parts = block_work(MODEL.layers[0], sizes)
    names = ("traffic", "backward_traffic", "met", "met_backward")
    return {name: sum(float(np.sum(getattr(part, name))) for part in parts) for name in names}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_layer_starts_and_moves_what_is_priced(ranks: int, dtype: torch.dtype) -> None:
    """The mean over the ranks, of which later ones see more tiles of queries and earlier ones more of keys."""
    alone = passes(0, 1, dtype=dtype)
    met = [passes(rank, ranks, dtype=dtype) for rank in range(ranks)]
    wanted = modelled(ranks, dtype)
    for way, suffix in enumerate(("", "_backward")):
        more = {found[way].starts.total() - alone[way].starts.total() for found in met}
        assert more == {wanted[f"met{suffix}"]}
        moves = float(np.mean([found[way].total for found in met]))
        assert moves == pytest.approx(wanted[f"{suffix[1:]}_traffic".lstrip("_")], rel=0.025)


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tiles_are_those_of_the_zigzag_layout(ranks: int, slices: int) -> None:
    """Per rank: how many, and how often each query and each key is read in the mean."""
    length = 8 * ranks * slices
    held = dealt(TokenLayout.ZIGZAG, length=length, ranks=ranks, slices=slices)
    each = held.shape[1] // slices
    found = [
        tile
        for own in held
        for index in range(slices)
        for owner in held
        for queries in [own[index * each : (index + 1) * each]]
        for tile in tiles(*seen_runs(np.sort(owner[: (index + 1) * each]), first=np.zeros_like(queries), last=queries))
    ]
    told = TileCounts.of(np.full(1, float(ranks)), np.full(1, float(slices)))
    assert len(found) / ranks == told.count
    for name in ("queries", "keys"):
        read = sum(tile_range.stop - tile_range.start for tile_range in (getattr(tile, name) for tile in found))
        assert read / length == pytest.approx(float(getattr(told, name)[0]))


def test_neighbouring_sequences_that_are_alike_are_attended_at_once() -> None:
    alike, apart = torch.zeros(BATCH, LENGTH, dtype=torch.int32), torch.zeros(BATCH, LENGTH, dtype=torch.int32)
    apart[0, LENGTH // 3 :] = 1
    none, same, other = (
        passes(1, 2, dtype=torch.float32, documents=documents)[0].starts[ATTENTION]
        for documents in (None, alike, apart)
    )
    assert same == none < other
