"""What workers do in the tests of ranks of matrices that they share: find them, factor them, balance factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.parallel.portable import portable
from meshwright.parallel.refactor import refactor
from meshwright.parallel.stable_rank import stable_ranks
from meshwright.spec.low_rank import matrices_with_ranks
from meshwright.spec.model import MatrixRank
from meshwright.spec.plan import Design
from tests.parallel.move_cases import Runner, runner

RANKS = {2: (MatrixRank(name="transform.down", rank=5), MatrixRank(name="transform.up", rank=16))}
MATRICES = ("layers.1.transform.up.weight", "layers.1.transform.down.weight", "layers.2.mixer.query.weight")


def with_ranks(design: Design) -> Design:
    return replace(design, model=design.model.with_ranks(RANKS))


def found_ranks(design: Design) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Stable ranks found from nothing, found again from where that ended, and those of singular values."""
    run = runner(design)
    run.step(0)
    first = _stable(run, {})
    second = _stable(run, {name: vector for name, (_, vector) in first.items()})
    exact = {}
    for name, matrix in _whole(run).items():
        if name.removeprefix("model.") in MATRICES:
            values = torch.linalg.svdvals(matrix)
            exact[name.removeprefix("model.")] = float(values.square().sum() / values[0].square())
    return {name: v for name, (v, _) in first.items()}, {name: v for name, (v, _) in second.items()}, exact


def _stable(run: Runner, starts: dict[str, Tensor]) -> dict[str, tuple[float, Tensor]]:
    found = stable_ranks(MATRICES, run.state(), starts=starts, group=dist.group.WORLD, device=torch.device("cpu"))
    return {name: (one.value, one.vector) for name, one in found.items()}


def factored(design: Design) -> dict[str, Any]:
    """Two steps, the switch, a step, factors balanced anew; the whole state before and after each."""
    dense = runner(design)
    dense.step(0)
    dense.step(1)
    before = _whole(dense)
    there = with_ranks(design)
    run = runner(there, seed=77)
    ranks = matrices_with_ranks(there.model)
    refactor(dense.state(), run.state(), ranks=ranks, group=dist.group.WORLD, device=torch.device("cpu"))
    switched = _whole(run)
    run.step(2)
    trained = _whole(run)
    state = run.state()
    refactor(state, state, ranks=ranks, group=dist.group.WORLD, device=torch.device("cpu"))
    return {"before": before, "switched": switched, "trained": trained, "balanced": _whole(run)}


def _whole(run: Runner) -> dict[str, Tensor]:
    """Every tensor of the state, gathered over those that share it; of all stages."""
    mine = {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).clone()
        for name, x in portable(run.laid, run.optimizer).tensors.items()
    }
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return {name: x for entry in told for name, x in entry.items()}
