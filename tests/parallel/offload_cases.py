"""What workers do in the tests of offload: train with copies there and back that one memory does not need."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshwright.parallel import apply, offload, optimizer, relocate, stored
from meshwright.parallel.offload import Copies
from meshwright.spec.plan import Design
from tests.parallel.move_cases import SEED, runner, sequences


def copying(stack: ExitStack) -> None:
    """Until `stack` closes, the device's memory and the host's are treated as two, and no tensor is too small."""
    for room in (apply, optimizer):
        stack.enter_context(mock.patch.object(room, "Copies", lambda device: Copies(device, always=True)))
    stack.enter_context(mock.patch.object(offload, "_LEAST_BYTES", 0))


def losses(design: Design, copies: bool) -> list[float]:
    """Of three steps."""
    with ExitStack() as stack:
        if copies:
            copying(stack)
        run = runner(design)
        return [run.step(number) for number in range(3)]


def shards_away(design: Design) -> set[bool]:
    """Whether FSDP2 keeps shards in the host's memory, of every group of parameters."""
    laid = runner(design).laid
    modules = [module for part in laid.parts for module in part.modules() if isinstance(module, FSDPModule)]
    states = [module._get_fsdp_state() for module in modules]
    return {group.fsdp_params[0].offload_to_cpu for state in states for group in _groups(state) if group.fsdp_params}


def _groups(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if found is None else found
    return [group for group in found if group is not None]


def go_on(design: Design, folder: str, steps: int, more: int) -> list[float]:
    """Losses of `more` steps from the state in `folder`, after a step of its own that it must forget."""
    with ExitStack() as stack:
        copying(stack)
        run = runner(design, seed=SEED + 1)
        run.step(0)
        relocate.load(stored.Reader(Path(folder)), run.state(), group=dist.group.WORLD)
        return [run.step(number) for number in range(steps, steps + more)]


def with_groups(design: Design, **changes: Any) -> Design:
    """The same plan with `changes` in every block group."""
    stages = tuple(
        replace(stage, groups=tuple(replace(group, **changes) for group in stage.groups))
        for stage in design.plan.stages
    )
    return replace(design, plan=replace(design.plan, stages=stages))


def tokens(design: Design) -> tuple[Tensor, Tensor]:
    rows = sequences(0, design.plan.batch, design)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
