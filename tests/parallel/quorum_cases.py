"""Learners that meet without those that have not come: what workers do, and the same written out on one device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.parallel.outer import Round
from meshwright.parallel.torch_compat import store_of_ranks
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import WorkerFailed
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import PACKINGS, SyncKind
from tests.parallel.outer_cases import Learner, Parameters, Worker, goes_on_alike, new_learner, own_step, tokens_of

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
        self.number, self.found, self.sent_bytes = 0, list[Round](), list[int]()
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
            with counted() as sent:
                met = self.step(self.number)
            if met is not None and met.round is not None:
                self.found.append(met.round)
                self.sent_bytes.append(sum(sent))
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


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of every message among some of the learners, which is sent in batches, inside."""
    found: list[int] = []
    send = dist.batch_isend_irecv

    def noted(messages: list[dist.P2POp]) -> Any:
        found.extend(each.tensor.nbytes for each in messages if each.op is dist.isend)
        return send(messages)

    with mock.patch.object(dist, "batch_isend_irecv", noted):
        yield found


def met_without(
    design: Design, slow: int, until: int, rounds: int
) -> tuple[int, dict[str, numpy.ndarray], Told, list[int]]:
    """The learner of this rank, its parameters after `rounds` rounds, those in which it met, and the bytes that this
    rank sent in each to some of the learners."""
    worker = Absent(design, slow=slow, until=until, rounds=rounds)
    worker.train()
    own = worker.parameters()
    worker.close()
    return worker.learners.index, own, [found.to_dict() for found in worker.found], worker.sent_bytes


def resumed_after_absence(design: Design, slow: int, folder: str) -> bool:
    """As `outer_cases.resumed`, saved after three rounds, to the first two of which one learner did not come."""
    unbroken = Absent(design, slow=slow, until=3, rounds=3)
    unbroken.train()
    again = Worker(design)
    for worker in (unbroken, again):
        # Whoever is called comes with fewer steps, and when that is depends on the machine: nobody is called from here.
        quorum = worker.outer.quorum
        assert quorum is not None
        quorum._terms = replace(quorum._terms, quorum=design.plan.learners)
        quorum.begin()
    every = design.plan.gradients.rounds.every
    again.step(unbroken.last + every + 1)
    return goes_on_alike(unbroken, again, folder=Path(folder), at=unbroken.last, steps=unbroken.last + 2 * every)


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
    owed = Owed(known[0], learners=len(learners), precision=asked.precision)
    for found in rounds:
        weights, changes = [], []
        for index, arrival in sorted(found.arrivals.items()):
            learner, first = learners[index], arrival.base * asked.every
            for step in range(first + 1, first + arrival.steps + 1):
                _step(learner, step, index=index, design=design)
            late = len(known) - 1 - arrival.base
            weights.append(arrival.steps / (1 + late) ** 0.5)
            changes.append({name: known[arrival.base][name] - p for name, p in learner.named.items()})
        change = owed.mean(changes, weights, members=sorted(found.arrivals))
        anchor = {}
        for name, moved in change.items():
            momentum[name] = asked.momentum * momentum[name] + moved
            anchor[name] = known[-1][name] - asked.learning_rate * (moved + asked.momentum * momentum[name])
        known.append(anchor)
        for index in found.arrivals:
            for name, p in learners[index].named.items():
                p.copy_(anchor[name])
    return {name: p.numpy() for name, p in known[-1].items()}


class Owed:
    """What rounding leaves of every learner, as long as the model: of what it sends, `sent`, and of the sums that it
    makes, `made`, which are of the part that is its own where all meet.

    Both count as they do where all meet. Where some do not, what is left of sums goes to what their maker sends.
    """

    def __init__(self, like: Parameters, *, learners: int, precision: Precision) -> None:
        self.like, self.precision = like, precision
        size = sum(p.numel() for p in like.values())
        self.sent, self.made = (torch.zeros(learners, size, dtype=torch.float64) for _ in range(2))

    def mean(self, changes: Sequence[Parameters], weights: Sequence[float], members: Sequence[int]) -> Parameters:
        """The mean by weights of what the members changed, as it is with numbers of so few bits."""
        flats = [torch.cat([x.flatten() for x in change.values()]) for change in changes]
        given = [flat * weight / sum(weights) for flat, weight in zip(flats, weights, strict=True)]
        if self.precision not in PACKINGS:
            mean = torch.stack(given).sum(0)
        elif len(members) == 1:
            (only,) = members
            mean = given[0] + (self.sent[only] + self.made[only]) / len(self.sent)
            self.sent[only], self.made[only] = 0.0, 0.0
        else:
            mean = self._rounded(given, members)
        pieces = mean.split([p.numel() for p in self.like.values()])
        return {name: piece.view_as(p) for (name, p), piece in zip(self.like.items(), pieces, strict=True)}

    def _rounded(self, given: Sequence[Tensor], members: Sequence[int]) -> Tensor:
        size, count = given[0].numel(), len(members)
        all_meet = count == len(self.sent)
        each = PACKINGS[self.precision].filled(-(-size // count))
        parts = [slice(place * each, min((place + 1) * each, size)) for place in range(count)]
        heard, total = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        for member, own in zip(members, given, strict=True):
            if not all_meet:
                self.sent[member] += self.made[member]
                self.made[member] = 0.0
            # A mean over `count` of what each multiplied by it: in those units what is left is a share of a mean.
            wanted = own * count + self.sent[member] * count / len(self.sent)
            said = torch.cat([_few_bits(wanted[part], self.precision) for part in parts])
            self.sent[member] = (wanted - said) * len(self.sent) / count
            heard += said
        for member, part in zip(members, parts, strict=True):
            wanted = heard[part] + (self.made[member][part] if all_meet else 0.0)
            total[part] = _few_bits(wanted, self.precision)
            left = (wanted - total[part]) * len(self.sent) / count
            if all_meet:
                self.made[member][part] = left
            else:
                self.sent[member][part] += left
        return total / count


def _few_bits(x: Tensor, precision: Precision) -> Tensor:
    """x (n,) in whole numbers from -127 to 127 of a power of two, or 128 at a time from -7 to 7 of their scale."""
    if not x.numel():
        return x
    if precision is Precision.INT8:
        scale = 2.0 ** torch.ceil(torch.log2(x.abs().max().clamp(min=2.0**-100) / 127.0))
        return torch.round(x / scale) * scale
    blocks = functional.pad(x, (0, -x.numel() % 128)).view(-1, 128)
    scales = (blocks.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-100) / 7.0).to(torch.bfloat16).double()
    # Sums of whole numbers of one scale lie halfway between two often: by the reciprocal, as what is held to this does.
    return (torch.round(blocks * scales.reciprocal()) * scales).view(-1)[: x.numel()]


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
