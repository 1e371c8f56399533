"""What workers do in the tests of moving a run between plans: train, save by name, load, go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.cost.holdings import Contents
from meshwright.parallel import Laid, build_mesh, build_optimizer, lay, portable, relocate, stored
from meshwright.spec.plan import Design

SEED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A laid model with its optimizer on this rank."""

    laid: Laid
    optimizer: torch.optim.Optimizer

    def state(self, contents: Contents = Contents.TRAINING) -> relocate.State:
        """What is saved, loaded and moved of it."""
        return relocate.state_of(self.laid.design, laid=self.laid, optimizer=self.optimizer, contents=contents)

    def step(self, number: int) -> float:
        """One optimizer step on the global batch of that number; its loss."""
        design, mesh = self.laid.design, self.laid.mesh
        rows = design.plan.batch // mesh.data_size
        first = number * design.plan.batch + mesh.data_coordinate * rows
        tokens = sequences(first, rows, design)
        loss = self.laid.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), number=number)
        self.laid.clip(design.job.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)


def sequences(first: int, count: int, design: Design) -> Tensor:
    """Sequences [first, first + count) of an endless corpus, the same on every layout."""
    length = design.plan.sequence_length + 1
    rows = [torch.Generator().manual_seed(1000 + first + index) for index in range(count)]
    return torch.stack([torch.randint(0, design.model.vocab, (length,), generator=row) for row in rows])


def runner(design: Design, *, seed: int = SEED) -> Runner:
    mesh = build_mesh(design.plan, device_type="cpu", kv_heads=design.model.kv_heads)
    laid = lay(design, mesh, device="cpu", seed=seed)
    return Runner(laid=laid, optimizer=build_optimizer(laid, design.job.optimizer))


def train(design: Design, folder: str, steps: int, more: int) -> list[float]:
    """Losses of `steps` steps and of `more` after the state was written to `folder`."""
    run = runner(design)
    losses = [run.step(number) for number in range(steps)]
    stored.write(relocate.kept(run.state(), group=dist.group.WORLD), Path(folder), group=dist.group.WORLD)
    return losses + [run.step(number) for number in range(steps, steps + more)]


def go_on(design: Design, folder: str, steps: int, more: int) -> tuple[list[float], set[float]]:
    """Losses of `more` steps from the state in `folder`, and every step count the optimizer was given."""
    run = runner(design, seed=SEED + 1)
    relocate.load(stored.Reader(Path(folder)), run.state(), group=dist.group.WORLD)
    counts = {float(state["step"]) for state in run.optimizer.state.values()}
    return [run.step(number) for number in range(steps, steps + more)], counts


def names_and_round_trip(design: Design) -> tuple[set[str], float]:
    """The keys of this rank after a step, and the largest change that whole values make when loaded again."""
    run = runner(design)
    run.step(0)
    state = run.state().tensors
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in state.items()}
    before = {name: local(x).clone() for name, x in state.items()}
    run.step(1)
    assert any(not torch.equal(local(x), before[name]) for name, x in state.items())
    portable.load_state_dict(run.laid, run.optimizer, whole)
    changes = [float((local(x) - before[name]).abs().max()) for name, x in state.items() if local(x).numel()]
    return set(state), max(changes)


def moved(first: Design, second: Design, folder: str) -> tuple[list[float], list[float]]:
    """Losses of the next two steps by the plan that trained, and by the one its state was moved to."""
    here, there = runner(first), runner(second, seed=SEED + 1)
    here.step(0)
    relocate.move_through(
        Path(folder),
        here.state(),
        there.state(),
        group=dist.group.WORLD,
    )
    return [here.step(number) for number in (1, 2)], [there.step(number) for number in (1, 2)]


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
