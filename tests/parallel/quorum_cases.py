"""Learners that meet without those that have not come: what workers do, and the same written out on one device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.outer import Round
from meshwright.parallel.torch_compat import store_of_ranks
from meshwright.spec.errors import WorkerFailed
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import SyncKind
from tests.parallel.outer_cases import Learner, Parameters, Worker, new_learner, own_step, tokens_of

Told = list[dict[str, Any]]
_PATIENCE = 60.0


class Absent(Worker):
    """A learner of which number `slow` waits after its second step until round `until` is open, and the others after
    theirs until it waits: it is called to no round before."""

    def __init__(self, design: Design, *, slow: int, until: int, rounds: int) -> None:
        super().__init__(design)
        last = rounds * design.plan.gradients.rounds.every
        assert self.outer.quorum is not None
        self.quorum = self.outer.quorum
        self.quorum.with_all = lambda first, final: first <= last <= final
        self.number, self.found = 0, list[Round]()
        self.slow, self.until, self.last = slow, until, last
        self.store = store_of_ranks()
        # Workers of a pool serve many tests over one store: each has a name of its own.
        times = (self.store.add("absences", 1) - 1) // dist.get_world_size()
        self.word = f"away {times}"

    def train(self) -> None:
        """All rounds are over."""
        while self.number < self.last:
            if self.number == 2:
                self._wait()
            self.number += 1
            met = self.step(self.number)
            if met is not None and met.round is not None:
                self.found.append(met.round)
                self.number = self.quorum.last_step(met.round.number)

    def _wait(self) -> None:
        if self.slow < 0:
            return
        if self.learners.index != self.slow:
            self.store.wait([self.word], timedelta(seconds=_PATIENCE))
            return
        self.store.set(self.word, "")
        end = time.monotonic() + _PATIENCE
        assert self.quorum.roll is not None
        while self.quorum.roll.open().number < self.until and time.monotonic() < end:
            time.sleep(0.002)


def met_without(design: Design, slow: int, until: int, rounds: int) -> tuple[int, dict[str, numpy.ndarray], Told]:
    """The learner of this rank, its parameters after `rounds` rounds, and those in which it met."""
    worker = Absent(design, slow=slow, until=until, rounds=rounds)
    worker.train()
    own = worker.parameters()
    worker.close()
    return worker.learners.index, own, [found.to_dict() for found in worker.found]


def spoilt_while_away(design: Design) -> str:
    """What is raised where a bit of what a learner goes from is turned."""
    worker = Absent(design, slow=-1, until=0, rounds=3)
    try:
        if worker.learners.index == 1:
            next(worker.outer.tensors())[2].view(-1)[0] += 1e-12
        worker.train()
    except WorkerFailed as error:
        return str(error)
    finally:
        worker.close()
    return ""


def reference(design: Design, rounds: Sequence[Round]) -> dict[str, numpy.ndarray]:
    """What all learners go from after `rounds`, by plain autograd: learner i, from what all had after the round that it
    met in last, does so many steps on its own share of their batches; who came is averaged by steps over the root of
    one more than the rounds it is late, and Nesterov momentum steps by that."""
    asked = design.plan.gradients.rounds
    learners = [new_learner(design) for _ in range(design.plan.learners)]
    known: list[Parameters] = [{name: p.clone() for name, p in learners[0].named.items()}]
    momentum = {name: torch.zeros_like(p) for name, p in known[0].items()}
    for found in rounds:
        weights, changes = [], []
        for index, arrival in sorted(found.arrivals.items()):
            learner, first = learners[index], arrival.base * asked.every
            for step in range(first + 1, first + arrival.steps + 1):
                _step(learner, step, index=index, design=design)
            late = len(known) - 1 - arrival.base
            weights.append(arrival.steps / (1 + late) ** 0.5)
            changes.append({name: known[arrival.base][name] - p for name, p in learner.named.items()})
        change = {name: _mean([entry[name] for entry in changes], weights) for name in momentum}
        anchor = {}
        for name, moved in change.items():
            momentum[name] = asked.momentum * momentum[name] + moved
            anchor[name] = known[-1][name] - asked.learning_rate * (moved + asked.momentum * momentum[name])
        known.append(anchor)
        for index in found.arrivals:
            for name, p in learners[index].named.items():
                p.copy_(anchor[name])
    return {name: p.numpy() for name, p in known[-1].items()}


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.stack([value * weight for value, weight in zip(values, weights, strict=True)]).sum(0)
    return total / sum(weights)


def _step(learner: Learner, number: int, *, index: int, design: Design) -> None:
    tokens, targets = tokens_of(number, design)
    each = design.plan.batch // design.plan.learners
    rows = slice(index * each, (index + 1) * each)
    own_step(learner, tokens[rows], targets[rows], clip_norm=design.job.optimizer.clip_norm)


def with_quorum(design: Design, quorum: int, *, grace_seconds: float = 0.0) -> Design:
    """The same, of which so many learners end a round."""
    gradients = design.plan.gradients
    assert gradients.kind in (SyncKind.LOCAL, SyncKind.DILOCO)
    rounds = replace(gradients.rounds, quorum=quorum, grace_seconds=grace_seconds)
    return replace(design, plan=replace(design.plan, gradients=replace(gradients, rounds=rounds)))
