"""Replica: what a worker process runs where replicas meet by torchft: the run of its replica, among the others."""

from __future__ import annotations

import importlib
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from meshwright import cost
from meshwright.run.elastic.board import Epoch
from meshwright.run.elastic.epochs import of_this_launch, write
from meshwright.run.files import load_design
from meshwright.run.machine import cache_root
from meshwright.run.outcome import read_report
from meshwright.run.rank import StopRequest, finish, join, settle
from meshwright.run.rendezvous import store_of_launch
from meshwright.run.screen import Screen
from meshwright.run.torch_compat import limit_waits
from meshwright.run.torchft.lighthouse import READY
from meshwright.run.torchft.quorum import Group, Quorum
from meshwright.spec.plan import Design
from meshwright.spec.replicas import fewest_replicas, plan_of_replica, ranks_of_replica
from meshwright.train.build import Place, build
from meshwright.train.checkpoint.peers import DESCRIBED as CHECKPOINTS
from meshwright.train.loop import fit
from meshwright.train.observe.timekeeper import first_line
from meshwright.train.observe.whereabouts import Marker
from meshwright.train.replicas import Changed


def train_as_replica(
    run_dir: Path,
    *,
    name: str,
    lighthouse: str,
    word: str,
    max_steps: int | None,
    stop_at: float | None,
    screen: Screen,
) -> None:
    """This rank's part of the replica `name` is done: the run has ended. Raises what ended it before."""
    stop = StopRequest(stop_at=stop_at)
    stop.listen()
    design = load_design(run_dir / "design.json")
    settle(design, quiet=True)
    own, times = map(int, name.split("."))
    plan, local = plan_of_replica(design.plan), int(os.environ.get("RANK", "0"))
    number = ranks_of_replica(design.plan, own)[local]
    timeout = timedelta(seconds=design.job.peer_timeout_seconds)
    mine = replace(design, plan=plan)
    store = store_of_launch(timeout)
    device = join(mine, rank=local, ranks=plan.world_size, local_device=local, store=store, timeout=timeout)
    group = _group(design, own=own, rank=local, lighthouse=lighthouse, word=word)
    quorum = Quorum(
        group,
        ready=None if times else run_dir / READY,
        changed=_Epochs(run_dir, design),
        say=lambda line: print(line, file=sys.stderr),
    )
    place = Place(
        rank=local,
        device=device,
        run_dir=run_dir,
        cache=cache_root() / "data",
        screen=_terminal(screen),
        marker=Marker(run_dir, rank=number),
        replicas=quorum,
        number=number,
    )
    predicted = read_report(run_dir / "predicted.json") or cost.predict(design)
    techniques = importlib.import_module("meshwright.techniques").build(design.job.all_techniques, design=mine)
    run = build(mine, place=place, predicted=predicted, max_steps=max_steps, stop_asked=stop, techniques=techniques)
    limit_waits(timeout, but=CHECKPOINTS)
    start = time.perf_counter()
    try:
        ending = fit(run)
        finish(run, run_dir=run_dir, predicted=predicted, ending=ending, seconds=time.perf_counter() - start, stop=stop)
    except Exception as error:
        if run.observer is not None:
            run.observer.timekeeper.end(why=first_line(error))
        raise
    finally:
        quorum.close()


def _group(design: Design, *, own: int, rank: int, lighthouse: str, word: str) -> Group:
    plan = design.plan
    return Group(
        own=own,
        total=plan.replicate,
        rank=rank,
        size=plan.world_size // plan.replicate,
        fewest=fewest_replicas(plan, design.job.elastic),
        lighthouse=lighthouse,
        word=word,
        patience_seconds=design.job.peer_timeout_seconds,
    )


def _terminal(screen: Screen) -> TextIO:
    """Where the replica that tells writes for a person: the launcher's standard error."""
    with suppress(OSError):
        if screen is not Screen.QUIET:
            return open(f"/proc/{os.getppid()}/fd/2", "a", encoding="utf-8")
    return sys.stderr


class _Epochs:
    """Who trained from when on is kept as of any elastic run; a replica is named by its number."""

    def __init__(self, run_dir: Path, design: Design) -> None:
        self._run_dir, self._design = run_dir, design

    def __call__(self, change: Changed) -> None:
        ranks = [f"{rank}.0" for replica in change.present for rank in ranks_of_replica(self._design.plan, replica)]
        number = 0 if change.first else of_this_launch(self._run_dir)[-1].number + 1
        epoch = Epoch(
            number=number,
            members=tuple(ranks),
            design=str(self._run_dir / "design.json"),
            why="" if change.first else change.why,
            since=change.since,
            lost=bool(change.lost),
        )
        write(self._run_dir, epoch, plan=self._design.plan.digest())
