"""What workers do in the checkpoint tests: train, save through a Store, fail while saving, go on elsewhere."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel.clip import local_part
from meshwright.spec.errors import EnvironmentUnfit
from meshwright.spec.plan import Design
from meshwright.train.checkpoint import Store, write
from meshwright.train.state import TrainState
from tests.parallel.move_cases import SEED, Runner, runner


def train(run: Runner, state: TrainState, steps: int) -> list[float]:
    plan = run.laid.design.plan
    losses = []
    for _ in range(steps):
        losses.append(run.step(state.step))
        state.advance(sequences=plan.batch, tokens=plan.batch_tokens)
    return losses


def save_then_train(design: Design, directory: str) -> tuple[list[float], dict[str, Any], int]:
    """Four steps, each saved while the next is trained, and two more; the losses of those two, the state that was saved
    last, and the bytes of what it does not train on this rank."""
    run, state = runner(design), TrainState(seed=SEED)
    store = Store(Path(directory), design=design)
    saved: dict[str, Any] = {}
    for _ in range(4):
        train(run, state, 1)
        saved = state.to_dict()
        store.save(run.state(), step=state.step, progress=saved)
    losses = train(run, state, 2)
    store.close()
    still = [local_part(x) for _, x in run.laid.named_parameters() if not x.requires_grad]
    return losses, saved, sum(x.numel() * x.element_size() for x in still)


def resume(design: Design, directory: str) -> tuple[list[float], dict[str, Any]]:
    """Two steps from the newest checkpoint; the state it gave."""
    run, state = runner(design, seed=SEED + 1), TrainState()
    store = Store(Path(directory), design=design)
    assert store.newest(lambda newest: state.load(store.load(newest, run.state()))) is not None
    loaded = state.to_dict()
    losses = train(run, state, 2)
    store.close()
    return losses, loaded


def fill_the_disk_of_the_last_rank(design: Design, directory: str) -> tuple[str, int | None]:
    """A save that is whole, then one that the last rank cannot write; what every rank was told, and the newest left."""
    run, state = runner(design), TrainState(seed=SEED)
    store = Store(Path(directory), design=design)
    train(run, state, 1)
    store.save(run.state(), step=1, progress=state.to_dict())
    train(run, state, 1)
    store.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    told = ""
    try:
        store.save(run.state(), step=2, progress=state.to_dict())
        store.wait()
    except EnvironmentUnfit as error:
        told = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    newest = store.newest()
    store.close()
    return told, None if newest is None else newest.step


def die_while_saving(design: Design, directory: str, at: str) -> None:
    """One save that is whole, then one whose process is killed `at` a function of the writer."""
    run, state = runner(design), TrainState(seed=SEED)
    store = Store(Path(directory), design=design)
    train(run, state, 1)
    store.save(run.state(), step=1, progress=state.to_dict())
    store.wait()
    setattr(write, at, lambda *_, **__: os._exit(9))
    store.save(run.state(), step=2, progress=state.to_dict())
    store.wait()


def weights(run: Runner) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in run.laid.named_parameters()}
