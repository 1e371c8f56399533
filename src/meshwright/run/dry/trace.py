"""One rank's training steps as events: the same calls that a worker makes, on whatever tensors there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from meshwright import parallel
from meshwright.cost.token_layouts import ahead_of
from meshwright.parallel import Laid
from meshwright.parallel.outer import build_learners, build_outer_sync
from meshwright.parallel.precision import dtypes
from meshwright.run.dry.counter import StepCounter
from meshwright.run.dry.events import Event
from meshwright.run.dry.kernels import accelerator_kernels
from meshwright.run.dry.marks import Marks
from meshwright.run.dry.names import names_of
from meshwright.run.dry.recipes import Recipes
from meshwright.run.dry.torch_compat import ACCELERATOR, fake_world, real
from meshwright.schedule import planned
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.compression import usual_step
from meshwright.spec.job import Switch
from meshwright.spec.model import prefix_tokens
from meshwright.spec.plan import Design

GRADIENTS = "gradients"  # the mark where gradients are whole


def _nobody(_passes: int) -> None:
    """Nobody is told."""


def traced(
    design: Design, *, rank: int, recipes: Recipes | None = None, passed: Callable[[int], None] = _nobody
) -> tuple[Event, ...]:
    """The second step of global rank `rank` under a fake process group: the optimizer's state is there by then.

    The process is left as it was. On a cluster of accelerators the device is one without kernels. `recipes` are those
    of traces before. `passed` is told how many passes of the step are done.
    """
    accelerator = is_accelerated(design)
    world = fake_world(
        rank=rank, world_size=design.plan.world_size, accelerator=accelerator, recipes=recipes or Recipes()
    )
    with world:
        if not accelerator:
            return counted_step(design, device="cpu", passed=passed)
        with accelerator_kernels():
            return counted_step(design, device=ACCELERATOR, passed=passed)


def counted_step(design: Design, *, device: str, passed: Callable[[int], None] = _nobody) -> tuple[Event, ...]:
    """The second step of this rank of the default process group, counted, its passes told of as in `traced`.
    Collective."""
    marks, job = Marks(names_of(design.plan), passed=passed), design.job
    learners = real(build_learners)(design.plan, device_type=device, kv_heads=design.model.kv_heads)
    # What is counted is the step as it is written: compiled layers do the same work in fewer operators.
    own = replace(design, plan=design.plan.of_learner(), job=replace(job, compile=Switch.OFF))
    laid = parallel.lay(own, learners.mesh, device=device, seed=job.seed, recorder=marks)
    if design.plan.pipeline > 1:
        marks.watch(laid)
    optimizer = parallel.build_optimizer(laid, job.optimizer)
    outer = build_outer_sync(design, laid=laid, learners=learners, recorder=marks)
    batch = _batch(design, device=device)
    first = _first_step(design, batch)
    _step(laid, optimizer, first, clip_norm=job.optimizer.clip_norm, marks=marks)
    if outer is not None:
        outer.meet_once()
    counter = StepCounter(design, parts=laid.parts, optimizer=optimizer, device=device)
    with counter.watching():
        marks.start(counter)
        counter.mark("held")
        _step(laid, optimizer, batch, clip_norm=job.optimizer.clip_norm, marks=marks)
        if outer is not None:
            with counter.meeting():
                outer.meet_once()
            marks.mark("meeting")
    return counter.events()


def _step(
    laid: Laid,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor | None, ...],
    *,
    clip_norm: float | None,
    marks: Marks,
) -> None:
    tokens, targets, *beside = batch
    assert tokens is not None
    assert targets is not None
    laid.step(tokens, targets, *beside, number=usual_step(laid.design.plan.gradients.compression))
    marks.mark(GRADIENTS)
    marks.have_gradients()
    laid.clip(clip_norm)
    marks.mark("clip")
    optimizer.step()
    marks.mark("optimizer")


def _first_step(design: Design, batch: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """As much of the batch as the step before the counted one needs: a microbatch, where the schedule plays one."""
    plan = design.plan
    if plan.pipeline > 1 and planned.problems(planned.of_first(plan.schedule, 1), pipeline=plan.pipeline):
        return batch
    return tuple(None if tensor is None else tensor[: plan.microbatch] for tensor in batch)


def _batch(design: Design, *, device: str) -> tuple[torch.Tensor | None, ...]:
    plan = design.plan
    shape = (plan.batch // plan.data, plan.sequence_length)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
    documents = torch.zeros(shape, dtype=torch.int32, device=device) if reads_documents(design) else None
    if not design.model.prefix:
        return tokens, targets, documents, None
    if plan.context == 1:
        return tokens, targets, documents, torch.zeros(shape, dtype=torch.int32, device=device)
    return tokens, targets, documents, real(_ahead)(design, rows=shape[0])


def _ahead(design: Design, *, rows: int) -> torch.Tensor:
    """What tokens see ahead of themselves where every sequence is one document with the prompt that costs count: known
    numbers, for they decide what context ranks compute."""
    length = design.plan.sequence_length
    ahead = ahead_of(length, prefix=prefix_tokens(length, design.model.prefix))
    return torch.from_numpy(ahead).expand(rows, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsidePasses:
    """Bytes of microbatches that are not in their passes: `held` of the batch, `cut` of it for the step by a context
    rank or in slices, and `losses`, which are kept from the passes until the last of them is done."""

    held: float
    cut: float
    losses: float


def outside_passes(design: Design, *, rank: int, microbatches: int) -> OutsidePasses:
    """That of so many microbatches on pipeline rank `rank`."""
    plan = design.plan
    tokens = float(microbatches * plan.microbatch * plan.sequence_length)
    slices, documents = plan.schedule.slices, 4 if reads_documents(design) else 0
    of_token = 16 + documents + (4 if design.model.prefix else 0)
    # One row is a view of its slices; the documents of all of it are told to each.
    cuts = {plan.context > 1: 16 / plan.context, slices > 1: 16 * (plan.microbatch > 1) + slices * documents}
    loss = torch.promote_types(dtypes(plan, master=design.job.master).compute, torch.float32).itemsize
    keeps = plan.pipeline > 1 and plan.stages[-1].rank == rank
    return OutsidePasses(
        held=tokens * of_token,
        cut=tokens * cuts.get(True, 0.0),
        losses=float(microbatches * slices * loss) if keeps else 0.0,
    )


def reads_documents(design: Design) -> bool:
    """Whether documents are told apart: on processors, and where context ranks divide sequences, each is taken to fill
    its sequence, for how long they are decides what is computed."""
    return is_accelerated(design) and design.job.data.document_mask and design.plan.context == 1


def is_accelerated(design: Design) -> bool:
    return design.cluster.groups[0].device.kind is not DeviceKind.CPU
