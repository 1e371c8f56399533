"""Stable ranks of matrices that ranks share: ||W||_F^2 / sigma_max^2, by power iteration on what each rank holds.

Of all vectors of an iteration the best sum is taken, not the last one: with as many products that is far nearer. No
matrix is gathered. In an iteration every rank multiplies its parts by vectors twice, and all sum what they found in
one collective for all matrices together; those whose columns are divided need one more between the two products.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost.holdings import Box
from meshwright.parallel.clip import local_part
from meshwright.parallel.relocate import State

COLD, WARM = 16, 4  # iterations from a vector drawn by chance, and from the one found last


@dataclass(frozen=True, slots=True, kw_only=True)
class StableRank:
    """Of one matrix (m, n): its stable rank, and its first right singular vector (n) as bf16 in the host's memory, from
    which the next search begins."""

    value: float
    vector: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What this rank counts of one matrix (rows, columns): `part` is None where it has nothing or another counts it."""

    rows: int
    columns: int
    divides_columns: bool
    box: Box | None
    part: Tensor | None


def stable_ranks(
    names: Sequence[str],
    state: State,
    *,
    starts: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[str, StableRank]:
    """Stable ranks of the matrices `names`, as the whole model calls them, the same on every rank. Collective.

    `state` tells which part every process of `group` has. `starts` has vectors of an earlier call; a search without one
    begins by chance and takes four times as long.
    """
    held = [_held(name, state, group) for name in names]
    dtype = torch.float64 if any(x.dtype is torch.float64 for x in state.tensors.values()) else torch.float32
    starting = [_start(name, one, starts).to(device, dtype) for name, one in zip(names, held, strict=True)]
    squares = torch.zeros(len(held), dtype=dtype, device=device)
    for index, one in enumerate(held):
        if one.part is not None:
            squares[index] = torch.linalg.vector_norm(one.part, dtype=torch.float64).square()
    _sum([squares], group)
    alike: dict[int, list[int]] = {}
    for index, one in enumerate(held):
        alike.setdefault(one.columns, []).append(index)
    spaces = {columns: _Spaces(torch.stack([starting[i] for i in places])) for columns, places in alike.items()}
    order = [index for places in alike.values() for index in places]
    for _ in range(WARM if all(name in starts for name in names) else COLD):
        last = [x for space in spaces.values() for x in space.last]
        products = _multiplied([held[index] for index in order], last, group)
        for columns, places in alike.items():
            spaces[columns].extend(torch.stack(products[: len(places)]))
            del products[: len(places)]
    tops = [top for space in spaces.values() for top in space.tops()]
    sizes = squares.tolist()
    return {
        names[index]: StableRank(value=sizes[index] / max(value, torch.finfo(dtype).tiny), vector=vector)
        for index, (value, vector) in zip(order, tops, strict=True)
    }


class _Spaces:
    """Of matrices W alike in columns what the vectors (matrices, n) of an iteration on W^T W span, one more with each
    product, and that matrix there (Lanczos)."""

    def __init__(self, starts: Tensor) -> None:
        self._basis, self._diagonal, self._beside = _unit(starts)[:, None], list[Tensor](), list[Tensor]()

    @property
    def last(self) -> Tensor:
        return self._basis[:, -1]

    def extend(self, products: Tensor) -> None:
        """`products` are those of W^T W and the last vectors."""
        self._diagonal.append((self.last * products).sum(dim=-1))
        rest = products[:, :, None]
        for _ in range(2):  # once leaves what rounding put in
            rest = rest - self._basis.mT @ (self._basis @ rest)
        rest = rest.squeeze(-1)
        norms = rest.norm(dim=-1)
        self._beside.append(norms)
        gone = norms <= 1e3 * torch.finfo(rest.dtype).eps * products.norm(dim=-1)
        new = torch.where(gone[:, None], torch.zeros_like(rest), _unit(rest))
        self._basis = torch.cat((self._basis, new[:, None]), dim=1)

    def tops(self) -> list[tuple[float, Tensor]]:
        """Of each matrix the largest eigenvalue there and its vector, as bf16 in the host's memory."""
        small = torch.diag_embed(torch.stack(self._diagonal, dim=1))
        if len(self._beside) > 1:
            beside = torch.stack(self._beside[:-1], dim=1)
            small = small + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
        values, vectors = torch.linalg.eigh(small.to("cpu", torch.float64))
        found = self._basis[:, :-1].mT @ vectors[:, :, -1:].to(self._basis)
        units = _unit(found.squeeze(-1)).to("cpu", torch.bfloat16)
        return list(zip(values[:, -1].tolist(), units, strict=True))


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def _held(name: str, state: State, group: dist.ProcessGroup | None) -> _Held:
    """What stands on several ranks is counted by the first of them."""
    holding, process = state.held[f"model.{name}"], 0 if group is None else dist.get_rank(group)
    rows, columns = holding.shape
    box = holding.parts.get(process)
    counts = box is not None and process == min(p for p, other in holding.parts.items() if other == box)
    return _Held(
        rows=rows,
        columns=columns,
        divides_columns=any(other.sizes[1] < columns for other in holding.parts.values()),
        box=box,
        part=local_part(state.tensors[f"model.{name}"]).detach() if counts else None,
    )


def _start(name: str, one: _Held, starts: Mapping[str, Tensor]) -> Tensor:
    known = starts.get(name)
    if known is not None:
        return known
    return torch.randn(one.columns, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _multiplied(held: Sequence[_Held], vectors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """W^T W v of every matrix and its vector (n). Collective."""
    middles: list[Tensor] = []
    for one, v in zip(held, vectors, strict=True):
        if one.part is None or one.box is None:
            middles.append(v.new_zeros(one.rows))
            continue
        found = one.part.to(v) @ v.narrow(0, one.box.starts[1], one.box.sizes[1])
        middles.append(_placed(found, one.rows, one.box.starts[0]))
    _sum([x for one, x in zip(held, middles, strict=True) if one.divides_columns], group)
    products: list[Tensor] = []
    for one, v, middle in zip(held, vectors, middles, strict=True):
        if one.part is None or one.box is None:
            products.append(torch.zeros_like(v))
            continue
        found = one.part.to(v).T @ middle.narrow(0, one.box.starts[0], one.box.sizes[0])
        products.append(_placed(found, one.columns, one.box.starts[1]))
    _sum(products, group)
    return products


def _placed(x: Tensor, length: int, start: int) -> Tensor:
    """Zeros of `length` with x from `start` on."""
    if len(x) == length:
        return x
    whole = x.new_zeros(length)
    whole.narrow(0, start, len(x)).copy_(x)
    return whole


def _sum(vectors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Every vector is its sum over the group, in one collective."""
    if group is None or not vectors:
        return
    flat = torch.cat(list(vectors))
    dist.all_reduce(flat, group=group)
    for x, piece in zip(vectors, flat.split([len(x) for x in vectors]), strict=True):
        x.copy_(piece)
