"""Functions of a divided tensor give each rank its part of what they give of the whole, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.parallel.divided import Divided, Division, ImaginedAxis, Indivisible, divided, order, own
from meshwright.parallel.divided_functions import ALONG, REDUCTIONS, Ruled
from meshwright.parallel.torch_compat import plain

RANKS = 2
HEADS = Division(dim=2, pieces=(8,))  # 4 heads of 2, of tensors (2, 3, 8)
PACKED = Division(dim=2, pieces=(8, 8, 8))
GROUPED = Division(dim=2, pieces=(8, 4, 4))
KERNELS = torch.arange(16.0).view(8, 1, 2)  # one of each channel
THRICE = KERNELS.repeat(3, 1, 1)
HALVES = Division(dim=2, pieces=(8, 8))
MASK = torch.tensor([[0.0, 1.0, 2.0]]).expand(3, 3)
OTHER = torch.arange(48.0).view(2, 3, 8)

Function = Callable[[Any], Any]
SAME: tuple[tuple[str, Division, Function], ...] = (
    ("heads", HEADS, lambda x: x.view(2, 3, 4, 2).transpose(1, 2)),
    ("heads by what is left", HEADS, lambda x: x.view(2, 3, -1, 2).permute(0, 2, 1, 3).contiguous()),
    ("heads and back", HEADS, lambda x: x.view(2, 3, 4, 2).transpose(1, 2).transpose(1, 2).reshape(2, 3, -1)),
    ("heads into the batch", HEADS, lambda x: x.view(2, 3, 4, 2).transpose(1, 2).reshape(8, 3, 2)),
    ("the batch into heads", HEADS, lambda x: x.view(2, 3, 4, 2).transpose(1, 2).reshape(8, 3, 2).view(2, 4, 3, 2)),
    ("flattened", HEADS, lambda x: x.unflatten(-1, (4, 2)).flatten(2)),
    ("another dim flattened", HEADS, lambda x: x.flatten(0, 1)),
    (
        "repeated heads",
        HEADS,
        lambda x: x.view(2, 3, 4, 2)[:, :, :, None, :].expand(2, 3, 4, 3, 2).reshape(2, 3, 12, 2),
    ),
    ("interleaved heads", HEADS, lambda x: x.view(2, 3, 4, 2).repeat_interleave(3, dim=2)),
    ("thirds split", PACKED, lambda x: x.split(8, dim=2)[1]),
    ("thirds cut", PACKED, lambda x: x.chunk(3, dim=-1)[2].view(2, 3, 4, 2)),
    ("thirds of heads", PACKED, lambda x: x.view(2, 3, 3, 4, 2).permute(2, 0, 3, 1, 4)[1]),
    ("thirds unbound", PACKED, lambda x: x.view(2, 3, 3, 4, 2).unbind(2)[0]),
    ("unlike pieces", GROUPED, lambda x: x[..., 8:12].view(2, 3, 2, 2)),
    ("unlike pieces split", GROUPED, lambda x: x.split([8, 4, 4], dim=-1)[0].view(2, 3, 4, 2)),
    ("every second", HEADS, lambda x: x[..., ::2] * x[..., 1::2]),
    ("one position", HEADS, lambda x: x[:, -1]),
    ("new dims", HEADS, lambda x: x[:, None, ..., None].squeeze(1).unsqueeze(0)),
    ("by tokens", HEADS, lambda x: x[:, torch.tensor([2, 0])]),
    ("half turned", HEADS, lambda x: torch.cat((-x.view(2, 3, 4, 2)[..., 1:], x.view(2, 3, 4, 2)[..., :1]), dim=-1)),
    ("stacked", HEADS, lambda x: torch.stack((x, x * 2), dim=1)),
    ("beside a whole", HEADS, lambda x: x * 2 + OTHER - x.shape[-1]),
    ("a whole before it", HEADS, lambda x: torch.arange(8.0) / (1 + x)),
    ("broadcast", HEADS, lambda x: x.view(2, 3, 4, 2).transpose(1, 2) + torch.ones(1, 1, 3, 1)),
    ("masked", HEADS, lambda x: x.masked_fill(OTHER > 20, 0.0)),
    ("softmax", HEADS, lambda x: functional.softmax(x, dim=1)),
    ("a mean", HEADS, lambda x: x.view(2, 3, 4, 2).pow(2).mean(-1, keepdim=True)),
    ("a sum away", HEADS, lambda x: x.sum(1)),
    ("a norm of a head", HEADS, lambda x: functional.layer_norm(x.view(2, 3, 4, 2), (2,))),
    ("scores", HEADS, lambda x: _heads(x) @ _heads(x + 1).transpose(-2, -1) + MASK),
    ("attention", HEADS, lambda x: functional.scaled_dot_product_attention(_heads(x), _heads(x), _heads(OTHER), MASK)),
    ("the end narrowed", HEADS, lambda x: x.narrow(1, -2, 2)),
    ("turned", HEADS, lambda x: x.mT * x[:, 0].T.t()[..., None]),
    ("the greater of two", HEADS, lambda x: torch.max(x, OTHER) + torch.min(OTHER, x) + x.max(other=OTHER)),
    ("shaped like it", HEADS, lambda x: torch.ones(3, 1).expand_as(x) * x + torch.arange(48.0).view_as(x)),
    ("scores by letters", HEADS, lambda x: torch.einsum("bihd,bjhd->bhij", x.view(2, 3, 4, 2), x.view(2, 3, 4, 2))),
    ("letters left out", HEADS, lambda x: torch.einsum("...ti, t", x, OTHER[0, 0, :3])),
    ("letters of a list", HEADS, lambda x: torch.einsum("bti,i,bqi->bti", [x, OTHER[0, 0], OTHER[:, :1]])),
    ("picked by tokens", HEADS, lambda x: x.index_select(1, torch.tensor([2, 0]))),
    ("gated by halves", HALVES, lambda x: functional.glu(x, dim=-1)),
    ("the greatest", HEADS, lambda x: x.topk(2, dim=1)[0]),
    ("logarithms", HEADS, lambda x: torch.log1p(x.abs()) + torch.special.expit(x).data),
    ("a slope of each channel", HEADS, lambda x: functional.prelu(x.transpose(1, 2), OTHER[0, 0]).transpose(1, 2)),
    ("a slope of all", HEADS, lambda x: functional.prelu(x, torch.tensor([0.5]))),
    ("channels by themselves", HEADS, lambda x: functional.conv1d(x.mT, KERNELS, OTHER[0, 0], 1, 1, groups=8).mT),
    (
        "thirds by themselves",
        PACKED,
        lambda x: functional.conv1d(x.mT, THRICE, padding=1, groups=24).mT,
    ),
    ("cast", HEADS, lambda x: x.to(torch.float64).type_as(x).float()),
)


def _heads(x: Any) -> Any:
    return x.view(2, 3, 4, 2).transpose(1, 2)


def _whole(division: Division) -> Tensor:
    return torch.randn(2, 3, division.total, generator=torch.Generator().manual_seed(1))


def _part(division: Division, rank: int) -> Divided:
    axis = ImaginedAxis(size=RANKS, rank=rank)
    return divided(own(_whole(division), division, axis), division, kind=Ruled, axis=axis)


@pytest.mark.parametrize(("division", "function"), [entry[1:] for entry in SAME], ids=[entry[0] for entry in SAME])
def test_a_part_of_the_result_is_the_result_of_a_part(division: Division, function: Function) -> None:
    expected = function(_whole(division))
    for rank in range(RANKS):
        found = function(_part(division, rank))
        assert isinstance(found, Divided)
        assert found.shape == expected.shape
        torch.testing.assert_close(plain(found), own(expected, found.division, found.axis))


REFUSED: tuple[tuple[str, Division, Function, str], ...] = (
    ("softmax", HEADS, lambda x: functional.softmax(x, dim=-1), "softmax along divided features"),
    ("norm", HEADS, lambda x: functional.layer_norm(x, (8,)), "layer_norm over divided features"),
    ("sum", HEADS, lambda x: x.sum(), "sum over divided features"),
    ("half", HEADS, lambda x: x[..., :4], "columns 0 to 4 of 8"),
    ("one", HEADS, lambda x: x[..., 0], "one of a divided dim is taken"),
    ("three heads", PACKED, lambda x: x.view(2, 3, 24).split(12, dim=2)[0], "columns 0 to 12 of 24"),
    ("odd heads", HEADS, lambda x: x.view(2, 3, 1, 8).view(2, 3, 8).view(6, 1, 8)[:, :, :4], "columns 0 to 4 of 8"),
    ("one head", Division(dim=2, pieces=(6,)), lambda x: x.view(2, 3, 3, 2), "does not divide by 2"),
    ("two ways", HEADS, lambda x: x + x.view(2, 3, 4, 2).transpose(2, 3).reshape(2, 3, 8), "divided in two ways meet"),
    ("joined", HEADS, lambda x: torch.cat((x, x), dim=-1), "joined along a divided dim"),
    ("topk", HEADS, lambda x: x.topk(2), "topk along divided features"),
    ("kth value", HEADS, lambda x: x.kthvalue(2), "kthvalue has no rule"),
    ("gated by heads", HEADS, lambda x: functional.glu(x, -1), "columns 0 to 4 of 8"),
    ("picked", HEADS, lambda x: x.index_select(-1, torch.tensor([1, 0])), "an index into a divided dim"),
    ("a diagonal", HEADS, lambda x: torch.einsum("bthh->bth", x.view(2, 3, 4, 2)), "einsum of a diagonal"),
    ("two letters", HEADS, lambda x: torch.einsum("bti,bjt->bij", x, x), "einsum of tensors divided in two ways"),
    ("capitals", HEADS, lambda x: torch.einsum("BTD->BT", x), "einsum is divided only with small letters"),
    ("by numbers", HEADS, lambda x: torch.einsum(x, [0, 1, 2], [0, 1]), "einsum is divided only with small letters"),
    ("into a whole", HEADS, lambda x: torch.zeros(2, 3, 8).add_(x), "a whole tensor is changed"),
    ("written", HEADS, lambda x: x.__setitem__(0, 0.0), "__setitem__ has no rule"),
    ("rolled flat", HEADS, lambda x: torch.roll(x, 5), "roll along divided features"),
    ("rolled", HEADS, lambda x: x.roll(1, -1), "roll along divided features"),
    ("flipped", HEADS, lambda x: x.flip(1, 2), "flip along divided features"),
    ("into another", HEADS, lambda x: torch.add(x, 1, out=OTHER), "add into a tensor that is there"),
    ("channels mixed", HEADS, lambda x: functional.conv1d(x.mT, KERNELS.expand(8, 8, 2)), "mixes divided channels"),
    ("by its numbers", HEADS, lambda x: OTHER[x[0].argmax(0)], "__getitem__ of a whole tensor with divided arguments"),
    ("spelt oddly", HEADS, lambda x: x.squeeze(), "squeeze called so has no rule"),
)


@pytest.mark.parametrize(
    ("division", "function", "words"), [entry[1:] for entry in REFUSED], ids=[entry[0] for entry in REFUSED]
)
def test_what_no_rank_can_do_alone_is_refused(division: Division, function: Function, words: str) -> None:
    with pytest.raises(Indivisible, match=words):
        function(_part(division, 1))


def test_the_order_of_ranks_and_back() -> None:
    whole = torch.arange(GROUPED.total)
    parts = [own(whole, Division(dim=0, pieces=GROUPED.pieces), ImaginedAxis(size=2, rank=rank)) for rank in range(2)]
    places = order(Division(dim=0, pieces=GROUPED.pieces), ranks=2)
    assert torch.equal(torch.cat(parts), whole[places])
    assert torch.equal(torch.cat(parts)[torch.tensor(places).argsort()], whole)


PLACES: tuple[Any, ...] = (0, 1, 2, -1, -2, -3, (1, 2), (0, 1), [0, -1], (2,), (1,), [])
BEFORE: dict[str, tuple[Any, ...]] = {
    "roll": (1,),
    "norm": (2,),
    "normalize": (2.0,),
    "topk": (2,),
}  # what a call names first


def _called(name: str) -> list[tuple[str, Function]]:
    """Every way in which a function can be told its dims, or told none; not all of them are torch's."""
    before, homes = BEFORE.get(name, ()), [torch, Tensor, functional]
    found: list[tuple[str, Function]] = []
    for func in [getattr(home, name) for home in homes if hasattr(home, name)]:
        found.append((f"{name}()", lambda x, f=func: f(x, *before)))
        found += [(f"{name}({flag})", lambda x, f=func, flag=flag: f(x, *before, flag)) for flag in (True, False)]
        for place in PLACES:
            spread = place if isinstance(place, (tuple, list)) else (place,)
            found += [
                (f"{name}({place})", lambda x, f=func, place=place: f(x, *before, place)),
                (f"{name}(*{place})", lambda x, f=func, spread=spread: f(x, *before, *spread)),
                (f"{name}({place}, True)", lambda x, f=func, place=place: f(x, *before, place, True)),
            ]
            for word in ("dim", "dims", "axis"):
                found.append((f"{name}({word}={place})", lambda x, f=func, k={word: place}: f(x, *before, **k)))
    shifts = ((1, 3), (1,), [2, 1])
    if name == "roll":
        found += [(f"roll({s}, {d})", lambda x, s=s, d=d: x.roll(s, d)) for s in shifts for d in PLACES]
    return found


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", sorted({**ALONG, **REDUCTIONS}))
def test_however_a_function_is_told_its_dims_it_gives_the_part_or_is_refused(name: str) -> None:
    for turned in (False, True):
        seen = {"given": 0, "refused": 0}
        for words, function in _called(name):
            _told(lambda x, f=function, t=turned: f(x.transpose(1, 2) if t else x), words, seen)
        assert seen["refused"] > 0, "dims that are divided are worked along"
        assert seen["given"] > 0 or (name == "normalize" and turned), "no dim is left to work along"


def _told(function: Function, words: str, seen: dict[str, int]) -> None:
    """One way of calling, on the whole and on both parts."""
    try:
        expected = function(_whole(HEADS))
    except (TypeError, RuntimeError, IndexError):
        return
    for rank in range(RANKS):
        try:
            found = function(_part(HEADS, rank))
        except Indivisible:
            seen["refused"] += 1
            continue
        seen["given"] += 1
        pairs = [(found, expected)] if isinstance(expected, Tensor) else zip(found, expected, strict=True)
        for part, whole in pairs:
            assert part.shape == whole.shape, words
            torch.testing.assert_close(plain(part), own(whole, part.division, part.axis), msg=words)
