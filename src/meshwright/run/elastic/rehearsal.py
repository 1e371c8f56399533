"""Rehearsal: what a process does only the first time, it does before others wait for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from meshwright import parallel
from meshwright.data import Corpus
from meshwright.parallel import Laid, outer
from meshwright.parallel.portable import portable
from meshwright.run.torch_compat import alone
from meshwright.spec.plan import Design
from meshwright.train.feed import Feed


def rehearse(design: Design, *, rank: int, corpus: Corpus) -> None:
    """`rank` of `design` was laid and has made a step, alone: nothing comes from the others, and nothing is left of it
    but what torch loads, compiles and remembers as it is first used."""
    plan, device = design.plan, torch.device("cpu")
    with alone(rank=rank, ranks=plan.world_size):
        learners = outer.build_learners(plan, device_type=device.type, kv_heads=design.model.kv_heads)
        own = replace(design, plan=plan.of_learner())
        laid = parallel.lay(own, learners.mesh, device=device, seed=design.job.seed)
        optimizer = parallel.build_optimizer(laid, design.job.optimizer)
        portable(laid, optimizer)
        feed = Feed.of(design, learners, device=device)
        loader = feed.loader(corpus, consumed=0)
        batch = feed.tensors(next(loader))
        loader.close()
        if learners.mesh.experts is None:  # whose sizes would be what nobody sent
            _pass(laid, *batch)
            laid.clip(design.job.optimizer.clip_norm)
        optimizer.step()


def _pass(laid: Laid, tokens: Tensor, targets: Tensor, documents: Tensor | None, ahead: Tensor | None) -> None:
    """Forward and backward: of stages each by itself, since one that waits for another is told by it what comes."""
    plan, model = laid.design.plan, laid.design.model
    if len(plan.stages) == 1:
        laid.step(tokens, targets, documents, ahead)
    elif plan.tensor == plan.context == plan.schedule.slices == 1:
        rows = slice(plan.microbatch)
        documents, ahead = (None if x is None else x[rows] for x in (documents, ahead))
        for part in laid.parts:
            hidden = torch.zeros(*tokens[rows].shape, model.width, dtype=laid.dtypes.compute)
            x = tokens[rows] if part.embeds else hidden.requires_grad_()
            part(x, documents=documents, ahead=ahead).sum().backward()
