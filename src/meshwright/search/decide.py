"""The decision: the space explored, plans that fit ranked, the best refined, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwright.search.arrangements import Arrangement, arrangements, placed
from meshwright.search.candidate import Decision, candidate, ordered_by
from meshwright.search.check import check
from meshwright.search.counsel import counsel
from meshwright.search.explain import changes, compared, rejected_for_memory, why
from meshwright.search.explore import EXHAUSTIVE, Explorer
from meshwright.search.fronts import front, joint
from meshwright.search.job_rules import allowed_precisions, check_job
from meshwright.search.laid_out import BESIDE, MOST, Side, best_alternatives, best_refined
from meshwright.search.misses import nothing_fits, nothing_legal
from meshwright.search.orders import WORTH, reorder
from meshwright.search.product import Rejection
from meshwright.search.quorum import Called, with_quorum
from meshwright.search.refine import Entry, distinct, entry_order, entry_value
from meshwright.search.rules import Scope
from meshwright.search.simple import simplest_first, why_simplest
from meshwright.search.skip import Skipped, skip
from meshwright.search.slowdown import advise_slowdown, is_held_to_time, slowest_seconds
from meshwright.search.space import Boundaries, Space, enumerate_plans
from meshwright.search.stages import balanced_stages
from meshwright.search.tailor import tailor
from meshwright.search.trainer import Trainer
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError, NoPlanFits, Problem
from meshwright.spec.job import JobSpec, Objective, Order, Switch
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design
from meshwright.spec.report import Report

SLACK = 1.02  # over the best scores, below which plans are priced: closed forms may be as much too short
RANKED = 10  # plans that are ranked unless more are asked for: of fewer, as many are laid out again
RUNTIME = frozenset({Scope.RUNTIME})


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best plan of a question, and what it costs."""

    design: Design
    report: Report


def design(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    *,
    top: int = 10,
    trainable: bool = False,
    trainer: Trainer | None = None,
    synthesize: bool = False,
    explained: bool = True,
) -> Decision:
    """The best plan for `job.objective` among all legal ones that fit, with the `top` best in order.

    Plans are priced in the order of what they can reach at best until no other can be better; the best are laid out
    again with block times of their own and priced one by one. `trainable` leaves out what this runtime cannot train,
    `trainer` what another one has no words for. `synthesize` has a schedule made to measure for the best plan, which
    takes its place where that pays. Why other plans are not chosen is only looked for where it is to be `explained`,
    which takes about as long as the search itself. Raises ConfigError when the job or its constraints are wrong,
    NoPlanFits with the closest miss when no legal plan fits or none is legal.
    """
    started = time.perf_counter()
    if synthesize and trainer is not None:
        what = f"{trainer.name} has no words for tables of our own"
        raise ConfigError(Problem(what=what, where="synthesize", fix="leave it out, or the trainer"))
    tried = _tried(model, cluster, job, top=top, trainable=trainable, trainer=trainer)
    kept = _worthwhile(tried.fitting, job.objective)
    laid = [(each, entry) for each in kept for entry in each.placed(each.refined, cluster)]
    refined = found = _ordered([entry for _, entry in laid], job.objective)
    best = next(each for each, entry in laid if entry is found[0])
    tailored = [tailor(refined[0], job.objective)] if synthesize else []
    refined = [*(each.entry for each in tailored if each.entry is not None), *refined]
    left_out: list[Skipped | Called] = [*_left_out(refined, job, trainer), *_called(refined, job, trainer)]
    refined = [*(each.entry for each in left_out if each.entry is not None), *refined]
    chosen, report = refined[0]
    asked = partial(_reasons, tried, best, cluster=cluster, job=job, trainer=trainer)
    reasons = asked(found, refined) if explained else ()
    return Decision(
        design=chosen,
        report=report,
        ranked=tuple(candidate(entry, figures) for entry, figures in refined[:top]),
        rejected=best.rejected,
        why=(*reasons, *(each.words for each in tailored), *(each.words for each in left_out)),
        front=joint([each.placed(front(each.found), cluster) for each in kept]),
        considered=sum(side.found.space.count for side in tried.sides),
        priced=sum(side.found.priced for side in tried.sides),
        fitting=sum(side.found.fitting for side in tried.sides),
        seconds=time.perf_counter() - started,
        predicts_only=check(chosen, scopes=RUNTIME),
        refined=len(refined),
        settled=all(each.settled for each in kept),
        ordered_by=ordered_by(made for made, _ in refined[:top]),
        trainer=None if trainer is None else trainer.name,
    )


def _reasons(
    tried: _Tried,
    best: _Arranged,
    found: Sequence[Entry],
    refined: Sequence[Entry],
    *,
    cluster: ClusterSpec,
    job: JobSpec,
    trainer: Trainer | None,
) -> tuple[str, ...]:
    """Why the first of `found`, which is of `best`, is chosen, and what the job did not ask for that would change the
    first of `refined`."""
    return (
        *why(found, best.found, best=partial(best_alternatives, sides=tried.beside(best), cluster=cluster)),
        *why_simplest(found, job.objective),
        *_why_placed(best, tried.fitting[0]),
        *advise_slowdown(refined[0], tried.fastest, best=partial(_searched, trainer=trainer)),
        *counsel(refined, job, trainer=trainer, best=_searched),
    )


def best(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    *,
    trainer: Trainer | None = None,
    explained: bool = True,
    below: float = np.inf,
    within: float | None = None,
) -> Best:
    """The best plan alone, as `design` finds it, without the reasons and the others. Raises as `design` does; that
    there is none is only said where it need not be `explained`, which takes as long as many searches.

    Where `below` is a value of what is minimised, there may be none unless a plan has less of it. Where steps are to
    take no longer than `within` seconds, as they are expected, the fastest plan is not asked for.
    """
    made_better = job.skip.share > 0.0 or job.synchronize.most_left_out > 0.0  # than what the search finds
    below = np.inf if made_better else BESIDE * below
    asked = partial(_tried, model, cluster, job, top=1, trainer=trainer, explained=explained, within=within)
    tried = asked(alone=not made_better, below=below)
    kept = _worthwhile(tried.fitting, job.objective)
    refined = _ordered([entry for each in kept for entry in each.placed(each.refined, cluster)], job.objective)
    left_out: list[Skipped | Called] = [*_left_out(refined, job, trainer), *_called(refined, job, trainer)]
    made, report = next((each.entry for each in left_out if each.entry is not None), refined[0])
    return Best(design=made, report=report)


def _searched(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, below: float = np.inf, trainer: Trainer | None = None
) -> Entry | None:
    try:
        found = best(model, cluster, job, trainer=trainer, explained=False, below=below)
    except (ConfigError, NoPlanFits):
        return None
    return found.design, found.report


def _left_out(refined: Sequence[Entry], job: JobSpec, trainer: Trainer | None) -> list[Skipped]:
    """What leaving out stages gains, where the job allows it; other trainers have no words for it."""
    return [skip(refined, job)] if job.skip.share > 0.0 and trainer is None else []


def _called(refined: Sequence[Entry], job: JobSpec, trainer: Trainer | None) -> list[Called]:
    """What rounds that a quorum ends gain, where the job allows it; other trainers have none."""
    return [with_quorum(refined, job)] if job.synchronize.most_left_out > 0.0 and trainer is None else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arranged:
    """What the search found with the machines in one order: the best laid out again, and whether no other is."""

    arrangement: Arrangement
    found: Explorer
    refined: list[Entry]
    settled: bool

    def placed(self, entries: Sequence[Entry], cluster: ClusterSpec) -> list[Entry]:
        """`entries` on the devices of `cluster` as it is listed."""
        return placed(entries, self.arrangement, cluster)

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        found = self.found
        memory = rejected_for_memory(found.table, found.prices, hopeless=found.hopeless)
        return (*memory, *found.held.rejected, *found.space.rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """All that was explored, the machines as they are listed first, and where plans fit the best of them; the `fastest`
    where others are held to its time."""

    sides: list[Side]
    fitting: list[_Arranged]
    fastest: Entry | None = None

    def beside(self, best: _Arranged) -> list[Side]:
        """All that was explored and has plans, that of `best` first; that alone where it is the fastest, whose job is
        another."""
        mine = [side for side in self.sides if side.found is best.found]
        if not mine:
            return [replace(self.sides[0], arrangement=best.arrangement, found=best.found)]
        return [*mine, *(side for side in self.sides if side.found is not best.found and side.found.space.count)]


def _tried(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    *,
    top: int,
    trainable: bool = False,
    trainer: Trainer | None = None,
    explained: bool = True,
    alone: bool = False,
    below: float = np.inf,
    within: float | None = None,
) -> _Tried:
    """Raises NoPlanFits, with the closest miss, where no plan is legal, or can be said, or none fits.

    A trainer knows the usual order of axes and machines alone, and trains the job its own way. What a plan holds may
    fall when it is laid out again, so that where memory is minimised as many are as are ranked, whatever `top` is. This
    runtime is what compiles a job, and can train its plans. Scores of plans are to be `below`; where the best is asked
    for `alone` they are of no machines in another order unless they promise a better one than those first.
    """
    trainable = trainable or (job.compile is Switch.ON and trainer is None)
    top = max(top, RANKED) if job.objective is Objective.MEMORY else top
    if trainer is not None:
        job = trainer.trained(replace(job, constraints=replace(job.constraints, order=Order.USUAL)))
    fastest = None
    if within is None:
        fastest = _fastest(model, cluster, job, trainable=trainable, trainer=trainer, explained=explained)
        within = np.inf if fastest is None else slowest_seconds(fastest.refined[0], job)
    asked = partial(_arranged, model, job=job, trainable=trainable, trainer=trainer, within=within)
    sides: list[Side] = []
    fitting: list[_Arranged] = []
    for arrangement in arrangements(cluster, job):
        worth = _limit(fitting[0], job.objective) if fitting and job.objective is not Objective.MEMORY else np.inf
        limit = min(below, BESIDE * worth)
        if alone or worth == np.inf or sides[0].found.space.count > EXHAUSTIVE:
            one, best = asked(arrangement, top=top, below=limit if alone else below)
        else:  # Is there a better one, before all are priced?
            one, best = asked(arrangement, top=1, below=limit)
            if best is not None and entry_value(best.refined[0], job.objective) < worth:
                one, best = asked(arrangement, top=top, below=below)
            else:
                best = None
        sides.append(Side(arrangement=arrangement, found=one, trainable=trainable))
        fitting += [best] if best is not None else []
    if not fitting and fastest is not None and below == np.inf:
        fitting = [fastest]
    if not fitting:
        raise _none(sides[0].found) if explained else NoPlanFits(Problem(what="no plan is legal and fits"))
    told = None if fastest is None else fastest.placed(fastest.refined[:1], cluster)[0]
    return _Tried(sides=sides, fitting=fitting, fastest=told)


def _fastest(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    *,
    trainable: bool,
    trainer: Trainer | None,
    explained: bool,
) -> _Arranged | None:
    """The fastest plan, where the job holds others to its time. Raises as `_tried` does."""
    if not is_held_to_time(job):
        return None
    timed, asked = replace(job, objective=Objective.TIME), partial(_tried, model, cluster, top=1, alone=True)
    found = asked(timed, trainable=trainable, trainer=trainer, explained=explained).fitting
    one = min(found, key=lambda each: entry_order(each.refined[0], Objective.TIME))
    return replace(one, refined=[(replace(made, job=job), report) for made, report in one.refined[:1]])


def _arranged(
    model: ModelSpec,
    arrangement: Arrangement,
    *,
    job: JobSpec,
    trainable: bool,
    trainer: Trainer | None,
    top: int,
    below: float,
    within: float,
) -> tuple[Explorer, _Arranged | None]:
    """What is explored of one arrangement, and its best plans; None where none fits `within` so many seconds, or scores
    `below`."""
    asked = partial(explored, trainable=trainable, trainer=trainer, count=top, below=below, within=within)
    one = asked(model, arrangement.cluster, job)
    if not one.fitting:
        return one, None
    reorder(one, top, trainable=trainable)
    refined, settled = best_refined(one, top, most=MOST * max(top, RANKED))
    if not refined:
        return one, None
    return one, _Arranged(arrangement=arrangement, found=one, refined=refined, settled=settled)


def _none(found: Explorer) -> NoPlanFits:
    """The closest miss."""
    asked = found.model, found.cluster, found.job
    if not found.space.count:
        return NoPlanFits(nothing_legal(*asked, found.space, listed=legal_space))
    if not found.priced:
        return NoPlanFits(found.held.nothing_left())
    return NoPlanFits(nothing_fits(*asked, found, explored=partial(explored, trainer=found.held.trainer)))


def _worthwhile(tried: Sequence[_Arranged], objective: Objective) -> list[_Arranged]:
    """The first, and those whose best plan is better by WORTH: machines stay as they are listed for less."""
    limit = _limit(tried[0], objective)
    return [tried[0], *(each for each in tried[1:] if entry_value(each.refined[0], objective) < limit)]


def _limit(first: _Arranged, objective: Objective) -> float:
    """What plans with the machines in another order are to be less than."""
    return entry_value(first.refined[0], objective) * (1.0 - WORTH)


def _ordered(entries: Sequence[Entry], objective: Objective) -> list[Entry]:
    """Plans of any order of machines, best first and of those as good the simplest."""
    return simplest_first(distinct(sorted(entries, key=lambda entry: entry_order(entry, objective))), objective)


def _why_placed(best: _Arranged, listed: _Arranged) -> tuple[str, ...]:
    """What the machines as they are listed would cost, where the ranks are placed on them in another order."""
    if best.arrangement.is_listed:
        return ()
    names = ", ".join(group.name for group in best.arrangement.cluster.groups)
    if not listed.arrangement.is_listed:
        return (f"machines in the order {names}: with those of the cluster as they are listed no plan fits",)
    head = f"machines as they are listed instead of in the order {names}"
    (ours, report), (theirs, other) = best.refined[0], listed.refined[0]
    return (compared(ours, report, theirs, other, head=head, rest=changes(ours, theirs)),)


def explored(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    *,
    trainable: bool = False,
    trainer: Trainer | None = None,
    count: int = 10,
    below: float = np.inf,
    within: float = np.inf,
) -> Explorer:
    """The space of the job, with at least its `count` best plans that fit priced, of those that score `below` and take
    no longer than `within` seconds."""
    space = legal_space(model, cluster, job, trainable=trainable, trainer=trainer)
    found = Explorer(space, model=model, cluster=cluster, job=job, trainer=trainer, below=below, within=within)
    if space.count and (refused := found.held.whatever_the_plan(space.lightest.rows_of(np.zeros(1, dtype=np.int64)))):
        raise NoPlanFits(refused)
    if space.count:
        found.best(count, slack=SLACK)
    return found


def legal_space(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, trainable: bool = False, trainer: Trainer | None = None
) -> Space:
    """Every legal plan, with stages balanced by the cost model's block times, or as `trainer` divides the model itself;
    nothing is priced."""
    check_job(model, cluster, job)
    boundaries = {
        kind: _boundaries(balanced_stages(model, cluster, job, precision=kind), model, trainer)
        for kind in allowed_precisions(job, cluster)
    }
    return enumerate_plans(model, cluster, job, boundaries=boundaries, trainable=trainable)


def _boundaries(balanced: Boundaries, model: ModelSpec, trainer: Trainer | None) -> Boundaries:
    def dealt(pipeline: int, ranks: Sequence[int], devices: int) -> Sequence[int]:
        own = trainer.stages(model, pipeline) if trainer is not None and len(ranks) == pipeline else None
        return balanced(pipeline, ranks, devices) if own is None else (*own, len(model.blocks))

    return dealt
