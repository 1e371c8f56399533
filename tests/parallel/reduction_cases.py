"""What workers do in the tests of compressed gradients: single buckets, and steps of a small model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel import relocate, stored
from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.reduction import Travel
from meshwright.spec.compression import Compression
from meshwright.spec.plan import Design
from tests.parallel.move_cases import runner, sequences
from tests.parallel.parity_cases import whole

# A vector, matrices that are odd, wide and tall, a stack of them, and one that factors would not make smaller.
SHAPES = tuple(torch.Size(shape) for shape in ((7,), (33, 17), (9, 40), (3, 12, 11), (2, 3)))
SIZE = sum(shape.numel() for shape in SHAPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """Of one bucket: what was given out in all steps, what its rank gave in, and what it has left."""

    given: Any
    own: Any
    left: Any
    last: Any


def gradient(step: int, rank: int) -> Tensor:
    """Of a bucket of SHAPES, elements of very unlike size."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SIZE, dtype=torch.float64, generator=generator) * torch.logspace(-4, 1, SIZE)


def narrow_gradient(step: int, rank: int) -> Tensor:
    """Every matrix of rank 2, in one space of rows and of columns."""
    generator = torch.Generator().manual_seed(1)
    pieces = []
    for shape in SHAPES:
        rows, columns = (torch.randn(size, 2, dtype=torch.float64, generator=generator) for size in _last(shape))
        inner = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        pieces.append((rows @ inner @ columns.mT).expand(shape if len(shape) > 1 else (1, *shape)).reshape(-1))
    return torch.cat(pieces)


def _last(shape: torch.Size) -> tuple[int, int]:
    return (1, shape[0]) if len(shape) == 1 else (shape[-2], shape[-1])


def sums(kinds: Sequence[Compression], steps: int, narrow: bool) -> list[Summed]:
    """Of every kind, on one bucket of SHAPES."""
    group, found = dist.group.WORLD, []
    assert group is not None
    make = narrow_gradient if narrow else gradient
    for kind in kinds:
        like = torch.zeros(SIZE, dtype=torch.float64)
        reduction = Travel(compression=kind).reduction(like, SHAPES, [group])
        given, own = torch.zeros_like(like), torch.zeros_like(like)
        for step in range(steps):
            flat = make(step, group.rank())
            own += flat
            reduction.start(flat, step=step)
            reduction.turn()
            reduction.finish(flat)
            given += flat
        left = torch.cat([x.reshape(-1) for x in reduction.state]) if reduction.state else like[:0]
        found.append(Summed(given=given.numpy(), own=own.numpy(), left=left.numpy(), last=flat.numpy()))
    return found


def spoilt(kinds: Sequence[Compression]) -> list[bool]:
    """Whether every rank sees that one element of the last rank's gradient was no number."""
    group, found = dist.group.WORLD, []
    assert group is not None
    for kind in kinds:
        flat = gradient(0, group.rank())
        if group.rank() == group.size() - 1:
            flat[20] = torch.nan
        reduction = Travel(compression=kind).reduction(flat, SHAPES, [group])
        reduction.start(flat, step=0)
        reduction.turn()
        reduction.finish(flat)
        found.append(not bool(torch.isfinite(flat.norm())))
    return found


def in_small_buckets(kinds: Sequence[Compression]) -> list[bool]:
    """Of every kind, whether parameters in buckets that some are larger than meet as in one bucket of a whole."""
    group, found = dist.group.WORLD, []
    assert group is not None
    for kind in kinds:
        held = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]
        buckets = BucketedGradients(held, groups=[group], travel=Travel(compression=kind), bucket_bytes=1000)
        buckets.begin(step=1)
        buckets.before_backward(last=True)
        given = gradient(0, group.rank()).split([p.numel() for p in held])
        torch.stack([(p.view(-1) * x).sum() for p, x in zip(held, given, strict=True)]).sum().backward()
        buckets.after_backward()
        wanted = sum(gradient(0, rank) for rank in range(group.size()))
        summed = torch.cat([p.grad.view(-1) for p in held if p.grad is not None])
        found.append(bool(torch.allclose(summed, wanted, rtol=0.0, atol=1e-9)))
    return found


def trained(design: Design, steps: int) -> tuple[list[float], dict[str, Any], float]:
    """Losses, the parameters after them, and the largest element of what is kept of gradients."""
    run = runner(design)
    losses = [run.step(number) for number in range(1, steps + 1)]
    left = [float(x.abs().max()) for x in run.laid.residuals().values() if x.numel()]
    return losses, {name: whole(p.detach()) for name, p in run.laid.named_parameters()}, max(left, default=0.0)


def bytes_kept(design: Design) -> int:
    """Bytes of what lasts of gradients from step to step, on this rank."""
    return sum(x.nbytes for x in runner(design).laid.residuals().values())


def resumed(design: Design, folder: str) -> tuple[list[float], list[float], bool]:
    """Losses of steps 3 and 4 by the run itself and by one that loads it, and whether all their parameters agree."""
    run = runner(design)
    for number in (1, 2):
        run.step(number)
    stored.write(relocate.kept(run.state(), group=dist.group.WORLD), Path(folder), group=dist.group.WORLD)
    on = [run.step(number) for number in (3, 4)]
    other = runner(design, seed=99)
    relocate.load(stored.Reader(Path(folder)), other.state(), group=dist.group.WORLD)
    again = [other.step(number) for number in (3, 4)]
    pairs = zip(run.laid.named_parameters(), other.laid.named_parameters(), strict=True)
    return on, again, all(torch.equal(ours.detach(), theirs.detach()) for (_, ours), (_, theirs) in pairs)


def spoilt_step(design: Design) -> tuple[float, float]:
    """The norm of the gradients of a second step in which the last rank's parameters held a number that is none, and
    the largest element of what is kept after it is undone."""
    run = runner(design)
    run.step(1)
    mesh, plan = run.laid.mesh, design.plan
    tokens = sequences(0, plan.batch // mesh.data_size, design)
    if mesh.rank == plan.world_size - 1:
        with torch.no_grad():
            next(p for name, p in run.laid.named_parameters() if name.startswith("head")).to_local().fill_(torch.nan)
    run.laid.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), number=2)
    norm = float(run.laid.clip(None))
    run.laid.undo()
    return norm, max(float(x.abs().max()) for x in run.laid.residuals().values() if x.numel())


def norms(design: Design) -> tuple[float, float]:
    """The norm of the gradients of a step, and that of them all gathered on this rank."""
    run = runner(design)
    tokens = sequences(0, design.plan.batch // run.laid.mesh.data_size, design)
    run.laid.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), number=2)
    gathered = [torch.as_tensor(whole(p.grad)) for _, p in run.laid.named_parameters() if p.grad is not None]
    return float(run.laid.clip(None)), float(torch.cat([x.reshape(-1) for x in gathered]).norm())
