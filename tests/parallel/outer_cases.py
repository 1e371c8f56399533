"""Learners that meet in rounds: what workers do, and the same training written out on one device."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.nn import Decoder, initialize
from meshwright.parallel import build_mesh, build_optimizer, lay, relocate, stored
from meshwright.parallel.optimizer import block_of
from meshwright.parallel.outer import (
    Learners,
    Met,
    OuterSync,
    build_learners,
    build_outer_sync,
    loaded,
    saved,
    state_of,
)
from meshwright.parallel.relocate import State
from meshwright.spec.errors import WorkerFailed
from meshwright.spec.plan import Design, Plan
from meshwright.spec.span import Silent
from meshwright.spec.synchronize import Rounds, SyncKind, dealt
from tests.parallel.parity_cases import SEED, by_name

Parameters = dict[str, Tensor]


def tokens_of(step: int, design: Design) -> tuple[Tensor, Tensor]:
    """Tokens and targets (batch, length) of one step."""
    generator = torch.Generator().manual_seed(100 + step)
    plan = design.plan
    drawn = torch.randint(0, design.model.vocab, (plan.batch, plan.sequence_length + 1), generator=generator)
    return drawn[:, :-1].clone(), drawn[:, 1:].clone()


_LEARNERS: dict[object, Learners] = {}


def learners_over(plan: Plan) -> Learners:
    """The same groups for all plans of the same ranks: a worker forms each once."""
    ranks = (plan.axes, plan.extents)
    if ranks not in _LEARNERS:
        _LEARNERS[ranks] = build_learners(plan, device_type="cpu")
    return _LEARNERS[ranks]


class Worker:
    """One rank of learners that train `design`."""

    def __init__(self, design: Design, learners: Learners | None = None) -> None:
        self.design = design
        self.learners = learners or learners_over(design.plan)
        own = replace(design, plan=design.plan.of_learner())
        self.laid = lay(own, self.learners.mesh, device="cpu", seed=SEED)
        self.optimizer = build_optimizer(self.laid, design.job.optimizer)
        outer = build_outer_sync(design, laid=self.laid, learners=self.learners, recorder=Silent())
        assert outer is not None
        self.outer: OuterSync = outer

    def rows(self) -> slice:
        mesh = self.learners.mesh
        each = self.design.plan.batch // (self.learners.count * mesh.data_size)
        first = (self.learners.index * mesh.data_size + mesh.data_coordinate) * each
        return slice(first, first + each)

    def step(self, number: int) -> Met | None:
        tokens, targets = tokens_of(number, self.design)
        self.laid.step(tokens[self.rows()], targets[self.rows()])
        self.laid.clip(self.design.job.optimizer.clip_norm)
        self.optimizer.step()
        return self.outer.after_step(number, stop=False, spoilt=False)

    def state(self) -> State:
        return state_of(self.design, learners=self.learners, laid=self.laid, optimizer=self.optimizer)

    def parameters(self) -> dict[str, numpy.ndarray]:
        return by_name([(name, p.detach()) for name, p in self.laid.named_parameters()])

    def close(self) -> None:
        self.outer.drain()
        dist.barrier()


def trained(design: Design, steps: int) -> tuple[int, dict[str, numpy.ndarray], dict[str, numpy.ndarray]]:
    """After `steps` steps: the learner of this rank, its parameters whole, and the mean of all learners."""
    worker = Worker(design)
    for number in range(1, steps + 1):
        worker.step(number)
    own = worker.parameters()
    with worker.outer.as_one():
        mean = worker.parameters()
    again = worker.parameters()
    assert all(numpy.array_equal(own[name], again[name]) for name in own), "the mean was for a while"
    worker.close()
    return worker.learners.index, own, mean


def went_on(design: Design, steps: int) -> list[int]:
    """How often what travels went on inside each step, before its end."""
    worker, found = Worker(design), []
    for number in range(1, steps + 1):
        counts = []
        with ExitStack() as stack:
            for fragment in worker.outer._fragments:
                spy = mock.Mock(wraps=fragment.average.advance)
                stack.enter_context(mock.patch.object(fragment.average, "advance", spy))
                counts.append(spy)
            tokens, targets = tokens_of(number, worker.design)
            worker.laid.step(tokens[worker.rows()], targets[worker.rows()])
        found.append(sum(spy.call_count for spy in counts))
        worker.outer.after_step(number, stop=False, spoilt=False)
    worker.close()
    return found


def resumed(design: Design, folder: str, at: int, steps: int, begun: int = 0) -> bool:
    """Whether a run that is saved after `at` steps, forgotten and loaded ends in the same bits as one that is not;
    where `begun`, its learners begin after so many steps."""
    unbroken = Worker(design)
    if begun:
        unbroken.outer.begin(begun)
    for number in range(begun + 1, at + 1):
        unbroken.step(number)
    # Both have the same groups, over which what goes on when it has arrived would be in another order on each rank.
    unbroken.outer.drain()
    again = Worker(design)
    again.step(steps + 7)
    again.outer.drain()
    return goes_on_alike(unbroken, again, folder=Path(folder), at=at, steps=steps)


def goes_on_alike(unbroken: Worker, again: Worker, *, folder: Path, at: int, steps: int) -> bool:
    """Whether `again`, loaded from what `unbroken` saves after step `at`, ends in the same bits after `steps`."""
    kept = saved(unbroken.state(), unbroken.outer)
    folder.mkdir(exist_ok=True)
    stored.write(relocate.kept(kept, group=dist.group.WORLD), folder, group=dist.group.WORLD)
    told = unbroken.outer.told()
    for number in range(at + 1, steps + 1):
        unbroken.step(number)
    unbroken.outer.drain()
    assert again.outer.goes_on_from(told)
    relocate.load(stored.Reader(folder), loaded(again.state(), again.outer, step=at), group=dist.group.WORLD)
    again.outer.settle()
    for number in range(at + 1, steps + 1):
        again.step(number)
    ours, theirs = unbroken.parameters(), again.parameters()
    unbroken.close()
    again.close()
    return all(numpy.array_equal(ours[name], theirs[name]) for name in ours)


@dataclass
class Learner:
    """One learner of the reference."""

    decoder: Decoder
    optimizer: torch.optim.Optimizer

    @property
    def named(self) -> Parameters:
        return {name: p.data for name, p in self.decoder.named_parameters()}


@dataclass(frozen=True, kw_only=True)
class Absence:
    """Learner `learner` is lost after step `left`, and back after step `back`; where it is None all lose contact both
    times, and form again."""

    learner: int | None
    left: int
    back: int


def reference(design: Design, steps: int, absence: Absence | None = None) -> list[dict[str, numpy.ndarray]]:
    """The parameters of every learner after `steps` steps, by plain autograd and the papers' formulas, tensor by
    tensor."""
    plan = design.plan
    learners = [new_learner(design) for _ in range(plan.learners)]
    rule = Reference(plan.gradients.kind, plan.gradients.rounds, learners, design)
    for number in range(1, steps + 1):
        tokens, targets = tokens_of(number, design)
        each = plan.batch // len(learners)
        for index, learner in enumerate(learners):
            rows = slice(index * each, (index + 1) * each)
            own_step(learner, tokens[rows], targets[rows], clip_norm=design.job.optimizer.clip_norm)
        rule.after(number, rows=each)
        if absence is not None and absence.learner is not None:
            if number == absence.left:
                leave(rule, absence.learner)
            if number == absence.back:
                come(rule, absence.learner, design)
    return [{name: p.numpy().copy() for name, p in learner.named.items()} for learner in learners]


def own_step(learner: Learner, tokens: Tensor, targets: Tensor, *, clip_norm: float) -> None:
    """One step of a learner by itself on its own rows."""
    learner.optimizer.zero_grad()
    logits = learner.decoder(tokens)
    functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    norm = torch.stack([p.grad.square().sum() for p in learner.decoder.parameters()]).sum().sqrt()
    for p in learner.decoder.parameters():
        p.grad *= min(1.0, clip_norm / float(norm))
    learner.optimizer.step()


def new_learner(design: Design) -> Learner:
    spec: Any = design.job.optimizer
    decoder = Decoder(design.model).double()
    initialize(decoder, seed=SEED)
    small = [p for name, p in decoder.named_parameters() if p.dim() < 2 or name.startswith("embedding")]
    large = [p for p in decoder.parameters() if not any(p is other for other in small)]
    groups = [{"params": large, "weight_decay": spec.weight_decay}, {"params": small, "weight_decay": 0.0}]
    betas = (spec.beta1, spec.beta2)
    return Learner(decoder, torch.optim.AdamW(groups, lr=spec.learning_rate, betas=betas, eps=spec.epsilon))


class Reference:
    """Meetings of all learners at once, as dictionaries of whole parameters."""

    def __init__(self, kind: SyncKind, rounds: Rounds, learners: list[Learner], design: Design) -> None:
        self.kind, self.rounds, self.learners = kind, rounds, learners
        self.anchor = {name: p.clone() for name, p in learners[0].named.items()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.anchor.items()}
        parts = dealt([block.parameters for block in design.model.blocks], parts=rounds.fragments)
        self.names = [[n for n in self.anchor if block_of(n, design.model) in blocks] for blocks in parts]
        self.away: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self.read = [[0] * len(learners) for _ in parts]

    def after(self, step: int, *, rows: int = 1) -> None:
        rounds = self.rounds
        self.read = [[read + rows for read in each] for each in self.read]
        for part, names in enumerate(self.names):
            departs = step % rounds.every == rounds.starts(part) % rounds.every
            late = [{n: learner.named[n].clone() for n in names} for learner in self.learners]
            before = {n: self.anchor[n].clone() for n in names}
            if part in self.away and self.away[part][0] + rounds.delay == step:
                self.land(names, self.away.pop(part)[1], late)
            if departs:
                start = before if self.kind is SyncKind.CO2 else {n: self.anchor[n].clone() for n in names}
                sent = late if self.kind is SyncKind.CO2 else [dict(self.copies(names, i)) for i in range(len(late))]
                entries = [
                    {"change": {n: start[n] - own[n] for n in names}, "own": own, "read": read}
                    for own, read in zip(sent, self.read[part], strict=True)
                ]
                self.away[part], self.read[part] = (step, entries), [0] * len(sent)
                if rounds.delay == 0:
                    self.land(names, self.away.pop(part)[1], late)

    def copies(self, names: list[str], index: int) -> list[tuple[str, Tensor]]:
        return [(n, self.learners[index].named[n].clone()) for n in names]

    def land(self, names: list[str], entries: list[Any], now: list[Parameters]) -> None:
        rounds = self.rounds
        every = sum(entry["read"] for entry in entries)
        change = {n: sum(entry["change"][n] * entry["read"] for entry in entries) / every for n in names}
        if self.kind is SyncKind.CO2:
            self.stale(names, change)
        else:
            for n in names:
                self.momentum[n] = rounds.momentum * self.momentum[n] + change[n]
                self.anchor[n] -= rounds.learning_rate * (change[n] + rounds.momentum * self.momentum[n])
        for learner, entry, held in zip(self.learners, entries, now, strict=True):
            for n in names:
                if self.kind is SyncKind.EAGER:
                    new = self.anchor[n] + (held[n] - entry["own"][n])
                else:
                    new = rounds.own_share * held[n] + (1.0 - rounds.own_share) * self.anchor[n]
                learner.named[n].copy_(new)

    def stale(self, names: list[str], change: Parameters) -> None:
        rounds = self.rounds
        last = {n: rounds.learning_rate * self.momentum[n].clamp(-rounds.clip, rounds.clip) for n in names}
        moved = sum(float((change[n] - last[n]).square().sum()) for n in names) ** 0.5
        step = sum(float(last[n].square().sum()) for n in names) ** 0.5
        gap = 1.0 + rounds.penalty * moved / step if step > 0 else 1.0
        for n in names:
            self.momentum[n] = rounds.momentum * self.momentum[n] + change[n] / gap
            self.anchor[n] -= rounds.learning_rate * self.momentum[n].clamp(-rounds.clip, rounds.clip)


def leave(rule: Reference, index: int) -> None:
    """The learner is gone, with what it had sent."""
    del rule.learners[index]
    for read in rule.read:
        del read[index]
    for _, entries in rule.away.values():
        del entries[index]


def come(rule: Reference, index: int, design: Design) -> None:
    """A learner begins from the anchor, with the optimizer of the first one."""
    new = new_learner(design)
    new.optimizer.load_state_dict(copy.deepcopy(rule.learners[0].optimizer.state_dict()))
    for name, p in new.named.items():
        p.copy_(rule.anchor[name])
    rule.learners.insert(index, new)
    for read in rule.read:
        read.insert(index, 0)
    for _, entries in rule.away.values():
        own = {name: rule.anchor[name].clone() for name in entries[0]["own"]}
        entries.insert(index, {"change": {name: torch.zeros_like(p) for name, p in own.items()}, "own": own, "read": 0})


def in_every_step(design: Design, steps: int) -> dict[str, numpy.ndarray]:
    """The parameters after `steps` steps of plain data parallel."""
    mesh = build_mesh(design.plan, device_type="cpu")
    laid = lay(design, mesh, device="cpu", seed=SEED)
    optimizer = build_optimizer(laid, design.job.optimizer)
    each = design.plan.batch // mesh.data_size
    rows = slice(mesh.data_coordinate * each, (mesh.data_coordinate + 1) * each)
    for number in range(1, steps + 1):
        tokens, targets = tokens_of(number, design)
        laid.step(tokens[rows], targets[rows])
        optimizer.step()
    return by_name([(name, p.detach()) for name, p in laid.named_parameters()])


def spoilt_anchor(design: Design, missed: bool) -> str:
    """What is raised where a bit of one learner's anchor is another, or it `missed` a landing of a fragment."""
    worker = Worker(design)
    try:
        for number in range(1, 20):
            if number == 4 and worker.learners.index == 1:
                if missed:
                    worker.outer._fragments[0].landings -= 1
                else:
                    next(worker.outer.tensors())[2].view(-1)[0] += 1e-12
            worker.step(number)
    except WorkerFailed as error:
        return str(error)
    finally:
        worker.close()
    return ""


def spoilt_late(design: Design, steps: int) -> str:
    """What is raised at a save after `steps` steps where a bit of one learner's anchor is another since the last but
    one."""
    worker = Worker(design)
    try:
        for number in range(1, steps + 1):
            if number == steps and worker.learners.index == 1:
                next(worker.outer.tensors())[2].view(-1)[0] += 1e-12
            worker.step(number)
            if number < steps:
                worker.outer.check(number)
        worker.outer.check(steps)
    except WorkerFailed as error:
        return str(error)
    finally:
        worker.close()
    return ""


def other_rounds(design: Design, needed: tuple[int, ...], steps: int) -> list[tuple[int, int, float]]:
    """(step, steps of the rounds after it, their outer learning rate) wherever they change, in a run whose ranks need
    rounds of so many."""
    worker, found = Worker(design), []
    asked = mock.patch.object(worker.outer.pace, "needed", return_value=needed[dist.get_rank()])
    for number in range(1, steps + 1):
        with asked:
            met = worker.step(number)
        if met is not None and met.changed is not None:
            found.append((number, met.changed.every, met.changed.learning_rate))
    told = worker.outer.told()
    assert worker.outer.goes_on_from(told)
    worker.close()
    return found
