"""What workers do in the tests of runs in fp16: runs that begin with losses too large."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from meshwright.spec.plan import Design
from meshwright.train.events import Save, StepDone
from meshwright.train.loss_scale import LossScale
from meshwright.train.run import Run
from tests.train.spoilt_cases import held, runner


def trained(design: Design, folder: str, exponent: int | None, steps: int | None = None) -> dict[str, Any]:
    """A run to its end, or `steps` of it and saved, with losses that are 2 ** `exponent` times as large to begin with,
    or as many times as they were when it was saved; what it holds then."""
    run, told = runner(design, folder), list[str]()
    if exponent is not None:
        run.loss_scale = LossScale(exponent=exponent)
    with ExitStack() as patches:
        if run.observer is not None:
            patches.enter_context(patch.object(run.observer, "say", told.append))
        losses = _losses(run, steps or design.job.total_steps)
    if steps:
        run.perform(Save())
    scale = run.loss_scale.exponent
    return {**held(run), "losses": losses, "exponent": scale, "said": " ".join(told)}


def saved(design: Design, folder: str, exponents: tuple[int, ...], lost: int = 0) -> tuple[int, int]:
    """The scale of this rank's learner, and the steps since it fell, when a run is saved in which that of learner i
    was 2 ** `exponents[i]` to begin with, and no loss of step `lost` a number."""
    run = runner(design, folder)
    run.loss_scale = LossScale(exponent=exponents[dist.get_rank()])
    run.laid.parts[-1].register_forward_hook(
        lambda _module, _inputs, output: output * math.nan if run.state.step + 1 == lost else output
    )
    _losses(run, design.job.total_steps)
    run.perform(Save())
    run.close()
    return run.loss_scale.exponent, run.loss_scale.held


def _losses(run: Run, last: int) -> list[float]:
    found = []
    while run.state.step < last:
        done = run.step()
        assert isinstance(done, StepDone)
        found.append(done.loss)
    return found
