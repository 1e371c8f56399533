"""What workers do in the tests of gradients that travel in eight bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.nn import Decoder, initialize
from meshwright.parallel import lay, relocate, stored
from meshwright.parallel.clip import local_part
from meshwright.spec.plan import Design
from tests.parallel.move_cases import Runner, runner, sequences
from tests.parallel.parity_cases import SEED, whole
from tests.support.meshes import mesh_over


def steps_without_update(design: Design, count: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Gradients of the first step, their sum over `count` steps on other batches, and the largest residual."""
    run = runner(design)
    first: dict[str, Any] = {}
    total: dict[str, Any] = {}
    for number in range(count):
        _gradients(run, number)
        for name, parameter in run.laid.named_parameters():
            if parameter.grad is not None:
                value = whole(parameter.grad)
                first.setdefault(name, value)
                total[name] = total.get(name, 0.0) + value
    left = [float(x.abs().max()) for x in run.laid.residuals().values()]
    return first, total, max(left, default=0.0)


def _gradients(run: Runner, number: int) -> None:
    design, mesh = run.laid.design, run.laid.mesh
    rows = design.plan.batch // mesh.data_size
    tokens = sequences(number * design.plan.batch + mesh.data_coordinate * rows, rows, design)
    run.laid.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), number=number)


def bytes_left(design: Design) -> int:
    """Bytes of what rounding leaves, on this rank."""
    return sum(x.nbytes for x in runner(design).laid.residuals().values())


def bytes_sent(design: Design) -> tuple[list[int], list[int], int]:
    """Bytes of every all-to-all and gather of one step, and elements of this rank's gradients before sharding."""
    run = runner(design)
    elements = sum(local_part(p).numel() for _, p in run.laid.named_parameters())
    exchanged: list[int] = []
    gathered: list[int] = []
    exchange = dist.all_to_all_single

    def counting(into: Tensor, out: Tensor, **options: Any) -> Any:
        assert out.dtype is torch.uint8
        exchanged.append(out.nbytes)
        return exchange(into, out, **options)

    from meshwright.parallel import compress

    gather = compress.all_gather_single

    def counting_gather(into: Tensor, part: Tensor, **options: Any) -> Any:
        gathered.append(part.nbytes)
        return gather(into, part, **options)

    with (
        mock.patch.object(dist, "all_to_all_single", counting),
        mock.patch.object(compress, "all_gather_single", counting_gather),
    ):
        _gradients(run, 0)
    return exchanged, gathered, elements


def resumed(design: Design, folder: str) -> tuple[list[float], list[float], list[str]]:
    """Losses of two steps after two, by the run itself and by one that loads it; keys of this rank's residuals."""
    run = runner(design)
    for number in (0, 1):
        run.step(number)
    state = relocate.kept(run.state(), group=dist.group.WORLD)
    stored.write(state, Path(folder), group=dist.group.WORLD)
    on = [run.step(number) for number in (2, 3)]
    other = runner(design, seed=99)
    relocate.load(stored.Reader(Path(folder)), other.state(), group=dist.group.WORLD)
    keys = [name for name in state if name.startswith("optimizer.residual.")]
    return on, [other.step(number) for number in (2, 3)], keys


def beside_the_written_out(design: Design) -> float:
    """How far this rank's shards of the first gradients are from those that rounding gives which is written out: of
    what each rank sends of a unit to an owner, of what replicas send each other of all shards, and of their sums."""
    mesh, plan = mesh_over(design), design.plan
    laid = lay(design, mesh, device="cpu", seed=SEED)
    tokens = sequences(0, plan.batch, design)
    own = tokens[mesh.data_coordinate : mesh.data_coordinate + 1]
    laid.step(own[:, :-1].contiguous(), own[:, 1:].contiguous())
    every = [_alone(design, tokens[row : row + 1]) for row in range(plan.batch)]
    names, shards, place = list(every[0]), plan.shard, mesh.data_coordinate % plan.shard
    sent = []
    for replica in range(plan.replicate):
        members = every[replica * shards : (replica + 1) * shards]
        sums: dict[str, Tensor] = {}
        for unit in dict.fromkeys(_unit(name) for name in names):
            inside = [name for name in names if _unit(name) == unit]
            parts = [[each[name].chunk(shards)[place] for name in inside] for each in members]
            total = torch.stack([_rounded(torch.cat([x.flatten() for x in part])) for part in parts]).sum(dim=0)
            sums |= dict(zip(inside, total.split([x.numel() for x in parts[0]]), strict=True))
        sent.append(torch.cat([sums[name] for name in reversed(names)]))
    halves = torch.stack([torch.stack([_rounded(x) for x in each.chunk(plan.replicate)]) for each in sent]).sum(dim=0)
    wanted = torch.cat([_rounded(half) for half in halves])
    found = torch.cat([local_part(dict(laid.named_parameters())[name].grad).flatten() for name in reversed(names)])
    return float((found - wanted).abs().max())


def _unit(name: str) -> str:
    """The module that is sharded at once."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]


def _alone(design: Design, tokens: Tensor) -> dict[str, Tensor]:
    """Gradients of some sequences of the batch, on one device."""
    decoder = Decoder(design.model).double()
    initialize(decoder, seed=SEED)
    logits = decoder(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    (loss / design.plan.batch_tokens).backward()
    return {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}


def _rounded(x: Tensor) -> Tensor:
    """Whole numbers up to 127 of a scale that is a power of two."""
    scale = 2.0 ** torch.ceil(torch.log2(x.abs().max() / 127))
    return torch.round(x / scale) * scale
