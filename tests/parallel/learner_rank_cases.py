"""Learners whose model becomes low rank: what workers do, and the same written out on one device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor

from meshwright.nn.low_rank import balanced_factors
from meshwright.parallel.optimizer import block_of
from meshwright.parallel.outer import state_of
from meshwright.spec.errors import WorkerFailed
from meshwright.spec.low_rank import matrices_with_ranks
from meshwright.spec.plan import Design
from meshwright.spec.ranks import factor_names
from meshwright.spec.synchronize import dealt
from meshwright.train import replan
from tests.parallel.low_rank_cases import with_ranks
from tests.parallel.outer_cases import Reference, Worker, new_learner, own_step, tokens_of
from tests.parallel.parity_cases import by_name

Arrays = dict[str, numpy.ndarray]


def switched(design: Design, at: int, again: int, steps: int) -> tuple[int, Arrays]:
    """The learner of this rank and its parameters after `steps` steps, factored after `at` and balanced after `again`
    of them."""
    worker = Worker(design)
    run = _run_of(worker)
    for number in range(1, steps + 1):
        worker.step(number)
        run.state.step = number
        if number in (at, again):
            _replan(worker, run)
    found = _whole(worker.parameters(), design)
    worker.close()
    return worker.learners.index, found


def spoilt(design: Design) -> str:
    """What is raised where one learner has other factors than the rest."""
    worker = Worker(design)
    run, refactor = _run_of(worker), replan.refactor

    def other(source: Any, target: Any, **kwargs: Any) -> None:
        refactor(source, target, **kwargs)
        if worker.learners.index == 1:
            next(x for name, x in target.tensors.items() if ".up.up." in name).view(-1)[0] += 1e-12

    try:
        with mock.patch.object(replan, "refactor", other):
            _replan(worker, run)
    except WorkerFailed as error:
        return str(error)
    finally:
        worker.close()
    return ""


def _replan(worker: Worker, run: Any) -> None:
    replan.replan(run, with_ranks(worker.design))
    worker.laid, worker.optimizer = run.laid, run.optimizer


def _run_of(worker: Worker) -> Any:
    """As much of a run as changes its design."""
    run = SimpleNamespace(
        design=worker.design,
        laid=worker.laid,
        learners=worker.learners,
        outer=worker.outer,
        optimizer=worker.optimizer,
        store=mock.Mock(),
        profiler=mock.Mock(),
        observer=None,
        state=SimpleNamespace(step=0),
    )
    run.laid_state = lambda: state_of(run.design, learners=run.learners, laid=run.laid, optimizer=run.optimizer)
    return run


def reference(design: Design, at: int, again: int, steps: int) -> list[Arrays]:
    """As `switched`, of every learner, by plain autograd and tensor by tensor."""
    plan = design.plan
    learners = [new_learner(design) for _ in range(plan.learners)]
    rule = Reference(plan.gradients.kind, plan.gradients.rounds, learners, design)
    each = plan.batch // plan.learners
    for number in range(1, steps + 1):
        tokens, targets = tokens_of(number, design)
        for index, learner in enumerate(learners):
            rows = slice(index * each, (index + 1) * each)
            own_step(learner, tokens[rows], targets[rows], clip_norm=design.job.optimizer.clip_norm)
        rule.after(number, rows=each)
        if number in (at, again):
            _factor(rule, with_ranks(design))
    return [_whole(by_name(list(learner.named.items())), design) for learner in learners]


def _factor(rule: Reference, design: Design) -> None:
    """All that is on its way lands, learners are their mean, and go on from its factors."""
    for names, (_, entries) in [(rule.names[part], rule.away.pop(part)) for part in sorted(rule.away)]:
        rule.land(names, entries, [{n: learner.named[n].clone() for n in names} for learner in rule.learners])
    count = len(rule.learners)
    mean = {name: sum(each.named[name] for each in rule.learners) / count for name in rule.anchor}
    made = dict(_factors(mean, matrices_with_ranks(design.model)))
    kept = {name: p for name, p in mean.items() if f"{name.removesuffix('.weight')}.up.weight" not in made}
    for learner in rule.learners:
        new = new_learner(design)
        for name, p in new.decoder.named_parameters():
            p.data.copy_(made[name] if name in made else kept[name])
        before = dict(learner.decoder.named_parameters())
        for name, p in new.decoder.named_parameters():
            if name not in made:
                new.optimizer.state[p] = learner.optimizer.state[before[name]]
        learner.decoder, learner.optimizer = new.decoder, new.optimizer
    rule.anchor = {name: p.clone() for name, p in rule.learners[0].named.items()}
    rule.momentum = {
        name: torch.zeros_like(p) if name in made else rule.momentum[name] for name, p in rule.anchor.items()
    }
    parts = dealt([block.parameters for block in design.model.blocks], parts=rule.rounds.fragments)
    rule.names = [[n for n in rule.anchor if block_of(n, design.model) in blocks] for blocks in parts]
    rule.read = [[0] * count for _ in parts]


def _factors(mean: dict[str, Tensor], ranks: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    for matrix, rank in ranks.items():
        names = factor_names(matrix)
        whole = mean[f"{matrix}.weight"] if f"{matrix}.weight" in mean else mean[names[0]] @ mean[names[1]]
        yield from zip(names, balanced_factors(whole, rank), strict=True)


def _whole(found: Arrays, design: Design) -> Arrays:
    """Factors as their product, which is the same whatever their signs."""
    for matrix in matrices_with_ranks(with_ranks(design).model):
        up, down = (found.pop(name, None) for name in factor_names(matrix))
        if up is not None and down is not None:
            found[matrix] = up @ down
    return found
