"""Build a run from a design: corpus, mesh, laid model, optimizer, store, techniques and what watches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import psutil
import torch

from meshwright import cost, parallel
from meshwright.cost.alike import alike
from meshwright.data import Corpus, prepare
from meshwright.parallel import outer
from meshwright.parallel.compile import uncompiled
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import Interval, Switch
from meshwright.spec.plan import Design
from meshwright.spec.report import Report
from meshwright.train.checkpoint import Checkpoint, Store, is_corrupt, of_checkpoint
from meshwright.train.compile_trial import CompileTold, CompileTrial, LayerCompiler
from meshwright.train.copies import Copies
from meshwright.train.elastic import Inherited, Joining, KeepCopies, Membership, take_over
from meshwright.train.events import Reactor
from meshwright.train.feed import Feed
from meshwright.train.inquiries import Inquiries
from meshwright.train.interval import SaveForGoodput, predicted_costs, with_failures
from meshwright.train.moved_away import MovedAway, Stays
from meshwright.train.observe import trackers
from meshwright.train.observe.collective_log import CollectiveLog
from meshwright.train.observe.console import Console
from meshwright.train.observe.described import described
from meshwright.train.observe.metrics import Yardstick
from meshwright.train.observe.observer import Observer
from meshwright.train.observe.profile import Profiler, Sampling
from meshwright.train.observe.slowness import peers_of
from meshwright.train.observe.spans import SpanFile
from meshwright.train.observe.timekeeper import Timekeeper, goodput_of
from meshwright.train.observe.whereabouts import Marker
from meshwright.train.passed_over import PassedOver
from meshwright.train.policies import EndAt, EvaluateEvery, SaveEvery
from meshwright.train.replay import can_replay
from meshwright.train.replicas import ReplicaRun, Replicas
from meshwright.train.rounds import RoundFile, needs_all
from meshwright.train.run import Run
from meshwright.train.spikes import Usual
from meshwright.train.spoilt import OnSpoilt
from meshwright.train.state import TrainState
from meshwright.train.technique import Technique
from meshwright.train.verify import VerifyEvery
from meshwright.train.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one worker runs: its rank, its device, the run directory, the cache of tokenised text, its screen, what
    tells others where it is, the log of its collectives, where ranks are watched, and the `corpus` if it is open. One
    of a replica that meets its `replicas` has a number among the ranks of all of them, by which files are named."""

    rank: int
    device: torch.device
    run_dir: Path
    cache: Path
    screen: TextIO
    marker: Marker | None = None
    log: CollectiveLog | None = None
    corpus: Corpus | None = None
    replicas: Replicas | None = None
    number: int | None = None


def build(
    design: Design,
    *,
    place: Place,
    predicted: Report,
    max_steps: int | None,
    stop_asked: Callable[[], bool],
    techniques: tuple[Technique, ...] = (),
    joining: Joining | None = None,
) -> Run:
    """A run that stands where its newest complete checkpoint stands; at step 0 where there is none, with the weights
    that the job starts from; or where the ranks before left it, as `joining` tells where ranks may change.

    Every rank of the plan's world must call it, with the process group made. `max_steps` more steps are run at most.
    Raises ConfigError when there are checkpoints, none is complete and one of them was: what it held would be lost.
    """
    asked, job, plan = design, design.job, design.plan
    corpus = place.corpus or prepare_corpus(design, cache=place.cache)
    spans = SpanFile(place.run_dir, rank=place.rank if place.number is None else place.number)
    store, inherited = Store(place.run_dir / "checkpoints", design=design), joining.inherited if joining else None
    newest = None if inherited else _unless_lost(store, store.committed())
    before = inherited or newest
    design = store.follow(of_checkpoint(asked, newest)) if newest else asked
    state = TrainState(seed=job.seed, step=before.step if before else 0)
    profiler = _profiler(design, place=place, first_step=state.step + 1, spans=spans)
    learners = outer.build_learners(plan, device_type=place.device.type, kv_heads=asked.model.kv_heads)
    feed = Feed.of(design, learners, device=place.device)
    own, seed = replace(design, plan=plan.of_learner()), None if before else job.seed
    laid = parallel.lay(own, learners.mesh, device=place.device, seed=seed, recorder=profiler)
    optimizer = parallel.build_optimizer(laid, job.optimizer)
    profiler.watch(parts=laid.parts, optimizer=optimizer)
    run = _kind(place)(
        design=design,
        state=state,
        laid=laid,
        learners=learners,
        outer=outer.build_outer_sync(design, laid=laid, learners=learners, recorder=profiler),
        optimizer=optimizer,
        corpus=corpus,
        feed=feed,
        loader=feed.loader(corpus, consumed=0),
        store=store,
        profiler=profiler,
        spans=spans,
        marker=place.marker or Marker(place.run_dir, rank=place.rank),
        stop_asked=stop_asked,
        memory_bytes=memory_of(place.device),
        techniques=techniques,
        usual=Usual(spec=job.spike),
    )
    if joining is not None:
        run.membership = _membership(run, joining)
    saved = _begin(run, saved=newest is not None, inherited=inherited)
    pause_at = _pause(joining, step=state.step, max_steps=max_steps)
    run.reactors = _reactors(run, place=place, predicted=predicted, saved=saved, pause_at=pause_at)
    if place.rank == 0 and place.replicas is None:
        predicted = predicted if design is asked else cost.predict(design)
        run.observer = _observer(run, place=place, predicted=predicted, pause_at=pause_at)
        _say_skipped(run.observer, store.skipped, begins=before is None)
    return run


def _kind(place: Place) -> Callable[..., Run]:
    """A run of a world of its own, or of a replica among others."""
    return Run if place.replicas is None else partial(ReplicaRun, replicas=place.replicas)


def _profiler(design: Design, *, place: Place, first_step: int, spans: SpanFile) -> Profiler:
    sampling = Sampling.after(first_step)
    return Profiler(design, rank=place.rank, device=place.device, sampling=sampling, onward=spans)


def _begin(run: Run, *, saved: bool, inherited: Inherited | None) -> int | None:
    """The run stands where it goes on, by a checkpoint where one was `saved`; the step of the newest, or None."""
    for technique in run.techniques:
        technique.attach(run)
    if inherited is not None:
        take_over(run, inherited)
        newest = run.store.committed()
        run.store.skipped = ()  # none is passed over by what goes on from memory
        return _step_of(newest)
    if saved:
        return _step_of(_unless_lost(run.store, run.store.newest(run.restore)))
    if run.design.job.start:
        run.start_from(Path(run.design.job.start))
    return None


def _with_rounds(run: Run, *, run_dir: Path, pause_at: int | None) -> None:
    """Where learners may miss rounds they know to which ones all of them come, and who came is kept."""
    if run.outer is not None and run.outer.quorum is not None:
        run.outer.quorum.with_all = needs_all(run.design, pause_at=pause_at)
        run.rounds = RoundFile.of(run_dir, run.learners)


def _pause(joining: Joining | None, *, step: int, max_steps: int | None) -> int | None:
    """The step at which the run pauses; None where it trains to its end."""
    if joining is not None and joining.pause_at is not None:
        return joining.pause_at
    return None if max_steps is None else step + max_steps


def _membership(run: Run, joining: Joining) -> Membership:
    learners = run.learners
    way = joining.inherited.way if joining.inherited is not None else None
    copies = Copies(
        run.design,
        rank=learners.rank,
        group=learners.everyone if run.outer is None else None,
        held=None if way is None else way.target,
    )
    return Membership(copies=copies, change_asked=joining.change_asked, change=joining.change)


def _unless_lost(store: Store, newest: Checkpoint | None) -> Checkpoint | None:
    """What the run goes on from; None where it begins. Raises ConfigError where what was saved is lost."""
    if newest is None and any(is_corrupt(problem) for problem in store.skipped):
        raise ConfigError(store.skipped)
    return newest


def _step_of(checkpoint: Checkpoint | None) -> int | None:
    return None if checkpoint is None else checkpoint.step


def _say_skipped(observer: Observer, skipped: Sequence[Problem], *, begins: bool) -> None:
    for problem in skipped:
        observer.say(f"a checkpoint is passed over: {replace(problem, fix='')}")
    if begins and skipped:
        observer.say("no checkpoint is complete; the run begins again at step 0")


def prepare_corpus(design: Design, *, cache: Path, progress: Callable[..., None] | None = None) -> Corpus:
    """The corpus of the design's job, tokenised into `cache` unless it is there already."""
    job, length = design.job, design.plan.sequence_length
    return prepare(job.data, sequence_length=length, seed=job.seed, cache=cache, progress=progress)


def memory_of(device: torch.device) -> Callable[[], float]:
    """What this process holds: the peak of its allocator on an accelerator, its resident bytes on a processor."""
    if device.type == "cuda":
        return lambda: float(torch.cuda.max_memory_allocated(device))
    process = psutil.Process()
    return lambda: float(process.memory_info().rss)


def _saving(run: Run, *, place: Place, predicted: Report, saved: int | None) -> Reactor:
    spec = run.design.job.checkpoint
    if spec.on_the_way and spec.asynchronous and run.membership is None:
        run.store.prepare(run.laid_state())
    if spec.interval is Interval.STEPS:
        return SaveEvery(steps=spec.every_steps, saved=saved)
    past = run.store.share(lambda: goodput_of(place.run_dir))
    return SaveForGoodput(costs=with_failures(predicted_costs(predicted), past=past), saved=saved)


def _reactors(
    run: Run, *, place: Place, predicted: Report, saved: int | None, pause_at: int | None
) -> tuple[Reactor, ...]:
    job, membership = run.design.job, run.membership
    _with_rounds(run, run_dir=place.run_dir, pause_at=pause_at)
    if isinstance(run, ReplicaRun):
        run.observe = partial(_observer, run, place=place, predicted=predicted, pause_at=pause_at)
    compiler = LayerCompiler(laid=run.laid, refusal=uncompiled(run.design.plan))
    trial = CompileTrial(compiler=compiler, total_steps=job.total_steps)
    compiling = {Switch.AUTO: (trial,), Switch.ON: (CompileTold(),), Switch.OFF: ()}
    return (
        OnSpoilt(non_finite=job.non_finite, spike=job.spike, last_saved=saved, furthest=saved or 0),
        *_verifying(run, saved=saved),
        *compiling[job.compile],
        *_watching(run, place=place),
        EvaluateEvery(steps=job.evaluation.every_steps),
        _saving(run, place=place, predicted=predicted, saved=saved),
        *_keeping(run, place=place),
        *run.techniques,
        EndAt(total_steps=job.total_steps, pause_at=pause_at),
        *(() if membership is None else (_copying(membership, steps=job.elastic.copies_every),)),
    )


def _keeping(run: Run, *, place: Place) -> Iterator[Reactor]:
    """Their answers are files alone, and lines on rank 0."""
    yield Stays(marker=place.marker, log=place.log)
    if place.rank == 0 and place.replicas is None:
        yield MovedAway(place.run_dir, design=run.design)
        yield PassedOver(place.run_dir)


def _copying(membership: Membership, *, steps: int) -> KeepCopies:
    return KeepCopies(steps=steps, change=membership.change, inherited=membership.inherited)


def _verifying(run: Run, *, saved: int | None) -> Iterator[Reactor]:
    spec = run.design.job.verify
    if spec.every_steps:
        yield VerifyEvery(spec=spec, alike=alike(run.design), replays=can_replay(run.design), good=saved)


def _watching(run: Run, *, place: Place) -> tuple[Reactor, ...]:
    """Of a learner of several ranks, whose hosts know what they wait for. Its first rank keeps what is found."""
    mesh = run.learners.mesh
    run.log = place.log if place.device.type == "cpu" else None
    if run.log is None or mesh.everyone is None:
        return ()
    run.inquiries = Inquiries(group=mesh.everyone, device=place.device)
    members = run.design.plan.ranks_of_learner(run.learners.index)
    labels = peers_of(run.design)
    placement = run.design.plan.placement
    devices = members if placement is None else [placement[rank] for rank in members]
    return (
        Watch(
            members=members,
            peers=[labels[rank] for rank in members],
            health=run.inquiries.health,
            instrumented=run.profiler.instrumented,
            describe=partial(described, cluster=run.design.cluster, devices=devices),
            run_dir=place.run_dir if mesh.rank == 0 else None,
        ),
    )


def _observer(run: Run, *, place: Place, predicted: Report, pause_at: int | None) -> Observer:
    job = run.design.job
    tracker = trackers.build(job.trackers, run_dir=place.run_dir)
    tracker.start(codec.encode(run.design), step=run.state.step)
    tracker.attach(place.run_dir / "design.json")
    console = Console(stream=place.screen, total_steps=job.total_steps, end_step=pause_at)
    timekeeper = Timekeeper(place.run_dir)
    return Observer(console=console, tracker=tracker, yardstick=Yardstick.of(predicted), timekeeper=timekeeper)
