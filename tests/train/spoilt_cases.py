"""What workers do in the tests of spoilt steps: a run in which rank 1 gives no number, and one without that batch."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
import torch.distributed as dist

from meshwright import cost
from meshwright.parallel.clip import local_part
from meshwright.spec.errors import WorkerFailed
from meshwright.spec.plan import Design
from meshwright.train.build import Place, build
from meshwright.train.events import Evaluate, Evaluated, Skip, StepDone
from meshwright.train.loop import fit
from meshwright.train.run import Run
from tests.parallel.parity_cases import by_name, whole


def runner(design: Design, folder: str) -> Run:
    """The run of this rank, in its folder."""
    place = Place(
        rank=dist.get_rank(),
        device=torch.device("cpu"),
        run_dir=Path(folder),
        cache=Path(folder) / "cache",
        screen=sys.stderr,
    )
    return build(design, place=place, predicted=cost.predict(design), max_steps=None, stop_asked=bool)


def spoilt(design: Design, folder: str, batches: tuple[int, ...], times: float = math.nan) -> dict[str, Any]:
    """A run in which the last stage of rank 1 gives no number for these batches, or so many `times` what it should, to
    its end; what it holds then."""
    run = runner(design, folder)

    def spoil(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        bad = torch.is_grad_enabled() and run.state.consumed in [batch * design.plan.batch for batch in batches]
        return output * times if bad and dist.get_rank() == 1 else output

    run.laid.parts[-1].register_forward_hook(spoil)
    told = ""
    try:
        fit(run)
    except WorkerFailed as failure:
        told = str(failure)
    return {**held(run), "told": told}


def overshot(design: Design, folder: str) -> str:
    """What a run tells whose first update leaves a parameter of rank 1 infinite, though its loss was a number."""
    run = runner(design, folder)
    step = run.optimizer.step

    def too_far(*arguments: Any) -> None:
        step(*arguments)
        _, parameter = run.laid.named_parameters()[0]
        if dist.get_rank() == 1:
            local_part(parameter.detach()).fill_(float("inf"))

    with patch.object(run.optimizer, "step", too_far):
        try:
            fit(run)
        except WorkerFailed as failure:
            return str(failure)
    return ""


def flipped(design: Design, folder: str, steps: dict[int, int]) -> dict[str, Any]:
    """A run in which one bit of a parameter of rank `steps[s]` flips after step s, each once; what it holds at its end
    and what it said."""
    run, left, told = runner(design, folder), dict(steps), list[str]()
    step = run.optimizer.step
    if run.observer is not None:
        run.observer.say = told.append  # type: ignore[method-assign]  # what a person would read

    def losing(*arguments: Any) -> None:
        step(*arguments)
        if left.pop(run.state.step + 1, None) == dist.get_rank():
            _, parameter = run.laid.named_parameters()[0]
            local_part(parameter.detach()).view(-1).view(torch.int64)[3] ^= 1

    run.optimizer.step = losing  # type: ignore[method-assign]  # a memory that loses a bit
    failure = ""
    try:
        fit(run)
    except WorkerFailed as failed:
        failure = str(failed)
    return {**held(run), "told": told, "failure": failure}


def miscomputing(design: Design, folder: str, wrong: int, where: str) -> tuple[str, ...]:
    """What a run says in which rank `wrong` is: its update in every step (`update`), or in its second step alone, and
    from then on what its first layer gives (`layer`), to something else each time (`restless`), or nothing (`once`)."""
    run, told, calls, begun = runner(design, folder), list[str](), [0], [False]
    step = run.optimizer.step

    def update(*arguments: Any) -> None:
        step(*arguments)
        if dist.get_rank() == wrong and run.state.step + 1 >= 2 and (where == "update" or not begun[0]):
            begun[0] = True
            _, parameter = run.laid.named_parameters()[0]
            local_part(parameter.detach()).view(-1).view(torch.int64)[3] ^= 1

    def layer(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        times = {"layer": 1.0, "restless": float(calls[0])}.get(where, 0.0)
        return output * (1.0 + 1e-9 * times) if begun[0] else output

    next(iter(run.laid.parts[0].get_submodule("layers").children())).get_submodule("mixer").register_forward_hook(layer)
    with ExitStack() as patches:
        patches.enter_context(patch.object(run.optimizer, "step", update))
        if run.observer is not None:
            patches.enter_context(patch.object(run.observer, "say", told.append))
        try:
            fit(run)
        except WorkerFailed as failed:
            told.append(str(failed))
    run.close()
    return tuple(told)


def without(design: Design, folder: str, batches: tuple[int, ...]) -> dict[str, Any]:
    """A run that passes these batches by, to its end; what it holds then."""
    run = runner(design, folder)
    while run.state.step < design.job.total_steps:
        if run.state.consumed // design.plan.batch in batches:
            next(run.loader)
            run.perform(Skip())
            continue
        run.step()
    return held(run)


def held(run: Run) -> dict[str, Any]:
    """What a run that is over holds: its parameters and moments, and what it has read."""
    parameters = by_name([(name, p.detach()) for name, p in run.laid.named_parameters()])
    buffers = {name: whole(x) for part in run.laid.parts for name, x in part.named_buffers()}
    moments = [
        whole(x)
        for group in run.optimizer.param_groups
        for p in group["params"]
        for x in run.optimizer.state[p].values()
        if isinstance(x, torch.Tensor)
    ]
    assert all(numpy.isfinite(value).all() for value in (*parameters.values(), *moments))
    step, consumed, ledger = run.state.step, run.state.consumed, run.ledger
    ledger.gather(run.learners, run.outer, device=run.feed.device)
    run.close()
    read = {"step": step, "consumed": consumed, "read": ledger.read, "skipped": ledger.skipped}
    return {**read, "parameters": {**parameters, **buffers}, "moments": moments}


def trained(design: Design, folder: str) -> dict[str, Any]:
    """A run to its end, with the validation after it."""
    run = runner(design, folder)
    losses = [done.loss for _ in range(design.job.total_steps) if isinstance(done := run.step(), StepDone)]
    told = run.perform(Evaluate())
    assert isinstance(told, Evaluated)
    return {**held(run), "losses": losses, "validation": told.loss, "bits": told.bits_per_byte}
