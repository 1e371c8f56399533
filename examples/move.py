"""Train by one plan, move the whole run to another in memory, go on: torchrun --nproc-per-node 4 examples/move.py A B

A and B are files of plans of one model and job; the first plan's ranks are the first processes, the second's the last.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from meshwright import catalog, parallel
from meshwright.data import Corpus
from meshwright.parallel import relocate
from meshwright.parallel.mesh import build_mesh_over
from meshwright.parallel.outer.learners import Learners
from meshwright.run.machine import cache_root
from meshwright.spec.plan import Design
from meshwright.train.build import prepare_corpus
from meshwright.train.feed import Feed
from meshwright.train.state import TrainState

STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A design laid over this process, its optimizer, and the rows that this process reads."""

    design: Design
    laid: parallel.Laid
    optimizer: torch.optim.Optimizer
    feed: Feed

    def train(self, corpus: Corpus, state: TrainState, *, steps: int) -> float:
        """So many steps on, the last one's loss."""
        for _ in range(steps):
            first = state.consumed + self.feed.first
            loss = self.laid.step(*self.feed.tensors(corpus.train.at(np.arange(first, first + self.feed.rows))))
            self.laid.clip(self.design.job.optimizer.clip_norm)
            self.optimizer.step()
            state.advance(sequences=self.design.plan.batch, tokens=self.design.plan.batch_tokens)
        return float(loss)


def trainer(design: Design, *, processes: range, seed: int) -> Trainer | None:
    """None on a process that has no rank of the plan."""
    mesh = build_mesh_over(design.plan, device_type="cpu", processes=processes, kv_heads=design.model.kv_heads)
    if mesh is None:
        return None
    device = torch.device("cpu")
    laid = parallel.lay(design, mesh, device=device, seed=seed)
    optimizer = parallel.build_optimizer(laid, design.job.optimizer)
    feed = Feed.of(design, Learners(index=0, count=1, mesh=mesh), device=device)
    return Trainer(design=design, laid=laid, optimizer=optimizer, feed=feed)


def state_of(design: Design, found: Trainer | None, processes: range) -> relocate.State:
    """What every process holds of the design's state, and the tensors of this one."""
    laid, optimizer = (None, None) if found is None else (found.laid, found.optimizer)
    return relocate.state_of(design, laid=laid, optimizer=optimizer, processes=processes)


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    first, second = (catalog.load_design(Path(path)) for path in sys.argv[1:3])
    ours, theirs = range(first.plan.world_size), range(world - second.plan.world_size, world)
    corpus = prepare_corpus(first, cache=cache_root() / "data")
    one = trainer(first, processes=ours, seed=1)
    other = trainer(second, processes=theirs, seed=2)
    state = TrainState(seed=first.job.seed)
    if one is not None:
        loss = one.train(corpus, state, steps=STEPS)
        if ours[0] == dist.get_rank():
            print(f"step {state.step}: loss {loss:.4f} by {first.plan.describe()}", flush=True)
    moved = relocate.move(
        state_of(first, one, ours),
        state_of(second, other, theirs),
        group=dist.group.WORLD,
        progress=state.to_dict() if one is not None else None,
    )
    sent = torch.tensor(moved.counted.sent_bytes)
    dist.all_reduce(sent)
    if dist.get_rank() == 0:
        print(f"moved: {sent:,} bytes were sent, and {moved.least_bytes:,} is the least there is", flush=True)
    if other is not None:
        state.load(moved.progress or {})
        loss = other.train(corpus, state, steps=STEPS)
        if theirs[0] == dist.get_rank():
            print(f"step {state.step}: loss {loss:.4f} by {second.plan.describe()}", flush=True)
    dist.barrier()  # who is not in the second plan waits for those who are
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
