"""A small model in stages, and what every worker does with it in the pipeline tests."""

from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.cost.traffic_turns import shares_turns
from meshwright.nn.linear import Linear
from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.collectives import exchange
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.parallel.split import WeightGradients
from meshwright.parallel.synchronize import ShardedGradients, SharedGradients, Synchronizer
from meshwright.schedule import stage_rank
from meshwright.spec.plan import Axis, AxisName, BlockGroup, Plan, Schedule, ScheduleKind, Sharding, Stage

VOCAB, WIDTH, LENGTH, BLOCKS = 17, 8, 6, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear(WIDTH, WIDTH, bias=True)
        self.mix = Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        mixed = torch.cumsum(self.mix(x), dim=1) / 10
        if documents is not None:
            mixed = mixed * (1 + documents[..., None].to(x.dtype)) / 3
        return x + torch.tanh(self.inner(x)) + mixed


class Part(nn.Module):
    """Blocks [start, stop) of BLOCKS + 2: block 0 embeds, the last one is the head; named as the whole model."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH) if start == 0 else None
        self.layers = nn.ModuleDict({str(i): Block() for i in range(max(start, 1), min(stop, BLOCKS + 1))})
        self.head = Linear(WIDTH, VOCAB, bias=True) if stop == BLOCKS + 2 else None

    def forward(self, x: Tensor, *, documents: Tensor | None = None, ahead: Tensor | None = None) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, documents)
        return x if self.head is None else self.head(x)


def build(start: int, stop: int) -> Part:
    part = Part(start, stop).double()
    for name, parameter in part.named_parameters():
        seed = sum(ord(letter) * 31**place for place, letter in enumerate(reversed(name))) % 2**31
        with torch.no_grad():
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            parameter.copy_(values * 0.3)
    return part


@dataclass
class Spans:
    kept: list[tuple[str, int, int]] = field(default_factory=list)

    def record(self, name: str, start: float, seconds: float, *, stage: int = -1, microbatch: int = -1) -> None:
        assert seconds >= 0
        self.kept.append((str(name), stage, microbatch))


def batch(sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, VOCAB, (sequences, LENGTH + 1), generator=generator)
    documents = torch.randint(0, 3, (sequences, LENGTH), generator=generator, dtype=torch.int32)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous(), documents


def loss_share(tokens_in_batch: int):
    def share(logits: Tensor, targets: Tensor) -> Tensor:
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / tokens_in_batch

    return share


def make_plan(
    kind: ScheduleKind, *, pipeline: int, bounds: tuple[int, ...], microbatches: int, sharding: Sharding, data: int
) -> Plan:
    """`bounds` are where stages start, and the end of the last one."""
    stages = tuple(
        Stage(
            rank=stage_rank(kind, index, pipeline=pipeline, chunks=(len(bounds) - 1) // pipeline),
            groups=(BlockGroup(start=start, stop=stop, sharding=sharding),),
        )
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
    data_axis = AxisName.REPLICATE if sharding is Sharding.NONE else AxisName.SHARD
    return Plan(
        model="tiny",
        cluster="local",
        axes=(Axis(name=AxisName.PIPELINE, size=pipeline), Axis(name=data_axis, size=data)),
        stages=stages,
        schedule=Schedule(kind=kind, microbatches=microbatches, chunks=len(stages) // pipeline),
        sequence_length=LENGTH,
        microbatch=2,
    )


@dataclass
class Laid:
    """The stages of this rank, ready to run, and where it stands."""

    parts: list[Part]
    executor: PipelineExecutor
    spans: Spans
    rows: slice


def lay(plan: Plan) -> Laid:
    mesh = init_device_mesh("cpu", (plan.pipeline, plan.data), mesh_dim_names=("pipeline", "data"))
    rank, column = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    sharding = plan.first_group.sharding
    parts: list[Part] = []
    synchronizers: list[Synchronizer] = []
    manner = SharedGradients if shares_turns(plan) else ShardedGradients
    for index in plan.stages_of(rank):
        part = build(plan.stages[index].start, plan.stages[index].stop)
        if sharding is Sharding.NONE:
            synchronizers.append(BucketedGradients(part.parameters(), groups=[mesh.get_group("data")]))
        else:
            whole = sharding is Sharding.PARAMETERS
            for layer in part.layers.values():
                fully_shard(layer, mesh=mesh["data"], reshard_after_forward=whole)
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=whole)
            synchronizers.append(manner(part, shardings=dict.fromkeys(part.modules(), sharding)))
        parts.append(part)
    spans = Spans()
    local = plan.batch // plan.data
    executor = PipelineExecutor(
        parts=parts,
        synchronizers=synchronizers,
        weights=[WeightGradients([*part.layers.values(), *([part.head] if part.head else [])]) for part in parts],
        plan=plan,
        group=mesh.get_group("pipeline"),
        device=torch.device("cpu"),
        hidden=torch.empty(plan.microbatch, LENGTH, WIDTH, dtype=torch.float64, device="meta"),
        loss_function=loss_share(plan.batch * LENGTH),
        recorder=spans,
    )
    return Laid(parts=parts, executor=executor, spans=spans, rows=slice(column * local, (column + 1) * local))


class CountedGather:
    """An all-gather for FSDP2 that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> object:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedReduction(CountedGather):
    """A reduce-scatter for FSDP2 that counts its calls."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> object:
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def collectives(plan: Plan) -> tuple[int, int]:
    """How often one step gathers parameters and how often it reduces gradients, on this rank."""
    laid = lay(plan)
    gather, reduction = CountedGather(), CountedReduction()
    for part in laid.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduction)
    tokens, targets, documents = (x[laid.rows] for x in batch(plan.batch))
    laid.executor.step(tokens, targets, documents)
    return gather.calls, reduction.calls


class Failing(torch.autograd.Function):
    """Fails forward or backward."""

    @staticmethod
    def forward(_context: object, x: Tensor, now: bool) -> Tensor:
        if now:
            raise ArithmeticError("no such number")
        return x.clone()

    @staticmethod
    def backward(_context: object, *_gradients: Tensor) -> tuple[Tensor, None]:
        raise ArithmeticError("no such number")


def failure(plan: Plan, forward: bool) -> str:
    """What comes out of the executor when the last stage fails; the first stage waits in vain in a thread it leaves."""
    laid = lay(plan)
    tokens, targets, documents = (x[laid.rows] for x in batch(plan.batch))
    if not laid.executor.predicts:
        threading.Thread(target=laid.executor.step, args=(tokens, targets, documents), daemon=True).start()
        return "not this rank"
    laid.parts[-1].register_forward_pre_hook(lambda _, args: (Failing.apply(args[0], forward), *args[1:]))
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    try:
        laid.executor.step(tokens, targets, documents)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def parity(plan: Plan) -> dict[str, object]:
    """One step and one evaluation by `plan` against one device: the largest differences, and the spans of a step."""
    laid = lay(plan)
    parts, executor, spans, mine = laid.parts, laid.executor, laid.spans, laid.rows
    tokens, targets, documents = batch(plan.batch)
    share = loss_share(tokens.numel())
    whole_model = build(0, BLOCKS + 2)
    expected = share(whole_model(tokens, documents=documents), targets)
    expected.backward()
    losses = []
    for _ in range(2):  # the second step must be the first again: nothing is left over
        for part in parts:
            part.zero_grad()
        losses.append(executor.step(tokens[mine], targets[mine], documents[mine]))
        step_spans, spans.kept = spans.kept, []
        losses.append(executor.evaluate(tokens[mine], targets[mine], documents[mine]))
        spans.kept = []
    loss_error = 0.0
    for loss in losses:
        dist.all_reduce(loss)
        loss_error = max(loss_error, abs(float(loss) - float(expected.detach())))
    references = dict(whole_model.named_parameters())
    grad_error = 0.0
    for part in parts:
        for name, parameter in part.named_parameters():
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            grad_error = max(grad_error, float((gradient - references[name].grad).abs().max()))
    return {"loss": loss_error, "gradients": grad_error, "spans": step_spans}


def parities(plans: tuple[Plan, ...]) -> list[dict[str, object]]:
    return [parity(plan) for plan in plans]


def exchanged(elements: int) -> list[float]:
    """What every element that came is, and their count."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    found = exchange(torch.full((elements,), float(rank)), group=group, peer=1 - rank)
    (value,) = found.unique().tolist()
    return [value, found.numel()]
