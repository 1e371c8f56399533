"""One worker's part of a run, as rank, member of an elastic run or replica: all that its process imports."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil

from meshwright import cost
from meshwright.run import failure
from meshwright.run.elastic.member import train_as_member
from meshwright.run.environment import environment
from meshwright.run.files import load_design, write_json
from meshwright.run.handshake import WORD_VARIABLE
from meshwright.run.last_words import LastWords
from meshwright.run.machine import cache_root
from meshwright.run.outcome import read_report
from meshwright.run.rank import StopRequest, finish, join, settle
from meshwright.run.rendezvous import store_of_launch
from meshwright.run.screen import Screen
from meshwright.run.torch_compat import limit_waits
from meshwright.run.waiting import Waiting, waiting_of
from meshwright.spec.errors import ConfigError, ExitCode, Problem, WorkerFailed
from meshwright.spec.plan import Design
from meshwright.spec.report import Report
from meshwright.train.build import Place, build
from meshwright.train.checkpoint.peers import DESCRIBED as CHECKPOINTS
from meshwright.train.loop import fit
from meshwright.train.observe.collective_log import CollectiveLog
from meshwright.train.observe.listening import listening
from meshwright.train.observe.timekeeper import first_line, note_launch
from meshwright.train.observe.whereabouts import Marker, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the launcher told this process: its number among all and on its node, and how many there are."""

    device: int
    local_device: int
    size: int


def run(options: argparse.Namespace) -> int:
    """Trains as one rank as the `options` of the worker's command say; the exit code. What went wrong is in the file
    that the launcher reads."""
    faulthandler.enable()
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"]) if "TORCHELASTIC_ERROR_FILE" in os.environ else None
    failure.keep_room(error_file)
    begun: list[Begun] = []
    try:
        if options.member:
            train_as_member(
                options.run,
                homes=options.board,
                word=os.environ.pop(WORD_VARIABLE, ""),
                name=options.member,
                max_steps=options.steps,
                stop_at=options.stop_at,
                several_hosts=options.several_hosts,
            )
        elif options.replica:
            # A run without torchft needs none of it.
            importlib.import_module("meshwright.run.torchft.replica").train_as_replica(
                options.run,
                name=options.replica,
                lighthouse=options.lighthouse,
                word=os.environ.pop(WORD_VARIABLE, ""),
                max_steps=options.steps,
                stop_at=options.stop_at,
                screen=Screen.QUIET if options.quiet else Screen.NORMAL,
            )
        else:
            work(options.run, max_steps=options.steps, stop_at=options.stop_at, begun=begun.append)
    except Exception as error:
        if begun:
            begun[0].words.of(error)
        waiting = _waiting(error, begun)
        code = failure.record(error, path=error_file, run_dir=options.run, waiting=waiting)
        if error_file is None:
            print(f"meshwright: {error}", file=sys.stderr)
        return code
    failure.give_room(error_file)
    return int(ExitCode.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What knows where this rank is, and what it leaves behind where it fails."""

    marker: Marker
    words: LastWords


def _waiting(error: BaseException, begun: Sequence[Begun]) -> Waiting | None:
    """What this process waited in when it lost another one; None where it did not, or had not begun."""
    if isinstance(error, failure.LostPeers):
        return error.waiting
    return waiting_of(error, now=begun[0].marker.now) if begun and failure.is_lost_peer(error) else None


def work(run_dir: Path, *, max_steps: int | None, stop_at: float | None, begun: Callable[[Begun], None]) -> None:
    """This rank's part of the run in `run_dir` is done, and rank 0 has written how it ended.

    `begun` is told before this rank meets any other. From `stop_at` on, in seconds since the epoch, the run saves and
    stops as if a signal had asked for it.
    """
    stop = StopRequest(stop_at=stop_at)
    stop.listen()
    world = _world()
    design = load_design(run_dir / "design.json")
    if design.job.elastic.on:
        fix = "start it with meshwright train, or leave job.elastic.min_ranks at 0"
        what = "only its own launcher tells the ranks of an elastic run of each other"
        raise ConfigError(Problem(what=what, where="job.elastic.min_ranks", fix=fix))
    rank = _rank_of(design, world)
    settle(design, quiet=rank != 0)
    predicted = read_report(run_dir / "predicted.json") or cost.predict(design)
    if rank == 0:
        _fill(run_dir, design, predicted)
        note_launch(run_dir, plan=design.plan.digest(), began=psutil.Process().create_time())
    marker = Marker(run_dir, rank=rank)
    words = LastWords(run_dir, rank=rank)
    begun(Begun(marker=marker, words=words))
    timeout = timedelta(seconds=design.job.peer_timeout_seconds)
    store = store_of_launch(timeout)
    device = join(design, rank=rank, ranks=world.size, local_device=world.local_device, store=store, timeout=timeout)
    techniques = importlib.import_module("meshwright.techniques").build(design.job.all_techniques, design=design)
    log = CollectiveLog(run_dir, rank=rank)
    place = Place(
        rank=rank,
        device=device,
        run_dir=run_dir,
        cache=cache_root() / "data",
        screen=sys.stderr,
        marker=marker,
        log=log,
    )
    run = build(design, place=place, predicted=predicted, max_steps=max_steps, stop_asked=stop, techniques=techniques)
    limit_waits(timeout, but=CHECKPOINTS)
    start = time.perf_counter()
    try:
        with listening(log):
            ending = fit(run)
        seconds = time.perf_counter() - start
        if run.design.model != design.model:
            predicted = cost.predict(run.design)
        finish(run, run_dir=run_dir, predicted=predicted, ending=ending, seconds=seconds, stop=stop)
    except Exception as error:
        if run.observer is not None:
            run.observer.timekeeper.end(why=first_line(error))
        if isinstance(error, WorkerFailed):
            # Every rank raises it alike, so the checkpoint that its message names can still be completed.
            marker.mark(step=run.state.step, section=Section.SAVE)
            run.store.wait()
        raise
    words.unneeded()


def _fill(run_dir: Path, design: Design, predicted: Report) -> None:
    """A run that torchrun started has what `train` would have written of it."""
    for name, make in (("predicted.json", lambda: predicted), ("environment.json", lambda: environment(design))):
        if not (run_dir / name).exists():
            write_json(run_dir / name, make())


def _world() -> World:
    """From torchrun's variables; alone in a world of one without them."""
    return World(
        device=int(os.environ.get("RANK", "0")),
        local_device=int(os.environ.get("LOCAL_RANK", "0")),
        size=int(os.environ.get("WORLD_SIZE", "1")),
    )


def _rank_of(design: Design, world: World) -> int:
    """The plan's rank of this process."""
    wanted = design.plan.world_size
    if world.size != wanted:
        why = f"{world.size} workers were started and the plan has {wanted} ranks"
        raise ConfigError(Problem(what="wrong number of workers", why=why, fix=f"start {wanted} workers"))
    return design.plan.rank_on(world.device)
