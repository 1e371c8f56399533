"""Member: one worker of an elastic run. It trains in one epoch after another, and keeps its process and what it copied.

A worker that loses another one leaves its epoch: its run, its groups and its model are let go, its copies are not. It
waits for the launcher to say who is left, and goes on with them from the newest copy.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from meshwright.cost.copies import SLOTS
from meshwright.cost.learner_holdings import donor_of
from meshwright.data import Corpus
from meshwright.parallel.portable import Portable
from meshwright.parallel.relocate import State
from meshwright.run import failure
from meshwright.run.elastic.board import Board, Epoch, Key, Left
from meshwright.run.elastic.homes import Home
from meshwright.run.elastic.lines import Lines
from meshwright.run.elastic.outlook import Outlook
from meshwright.run.elastic.rehearsal import rehearse
from meshwright.run.elastic.seats import origins
from meshwright.run.files import load_design
from meshwright.run.last_words import LastWords
from meshwright.run.machine import cache_root
from meshwright.run.rank import StopRequest, end_with_launcher, finish, join, settle
from meshwright.run.torch_compat import forget_groups, formed_within, limit_waits
from meshwright.run.waiting import Waiting, waiting_of
from meshwright.spec.errors import WorkerFailed
from meshwright.spec.plan import Design, Plan
from meshwright.train.build import Place, build, prepare_corpus
from meshwright.train.checkpoint.peers import DESCRIBED as CHECKPOINTS
from meshwright.train.copies import Copies, Copy
from meshwright.train.elastic import Change, Inherited, Joining, abandon
from meshwright.train.events import Ending
from meshwright.train.loop import fit
from meshwright.train.observe.collective_log import CollectiveLog, keep_logs_of
from meshwright.train.observe.listening import listening
from meshwright.train.observe.timekeeper import first_line
from meshwright.train.observe.whereabouts import Marker, Section
from meshwright.train.run import Run

_FORMING_SECONDS = 25.0  # at the least, for a group to be formed: slower than that no rank is that lives


def train_as_member(
    run_dir: Path,
    *,
    homes: str,
    word: str,
    name: str,
    max_steps: int | None,
    stop_at: float | None,
    several_hosts: bool,
) -> None:
    """The run in `run_dir` has ended, or this worker, which is `name` to the launcher's board, is not needed.

    The board is at the first of `homes`, which are those of all hosts. Where there are several, others go on without
    this one when its launcher is gone.

    Raises LostPeers where ranks were lost and the launcher says that the run cannot go on.
    """
    places = [Home.of(text) for text in homes.split(",")]
    stop = StopRequest(stop_at=stop_at, heeds_launcher=not several_hosts)
    if several_hosts:
        end_with_launcher()
    member = _Member(run_dir=run_dir, board=Board.at(places, word=word), name=name, max_steps=max_steps, stop=stop)
    member.stop.listen()
    member.board.register(name, pid=os.getpid())
    design = load_design(run_dir / "design.json")
    settle(design, quiet=True)
    member.corpus = prepare_corpus(design, cache=member.cache)
    expected = member.board.expected
    if expected is not None:
        member.prepare(expected)
    _freeze()
    member.board.stand_ready(name)
    epoch = member.board.first_epoch(name)
    while epoch.members:
        gone = member.train(epoch)
        if gone is None:
            return
        forget_groups()
        member.board.leave(epoch.number, name, gone)
        _freeze()
        epoch = member.next_epoch(epoch)
        if epoch.why and not epoch.members:
            raise failure.LostPeers(gone.error, gone.waiting)


@dataclass(slots=True, kw_only=True)
class _Shelf:
    """Copies of the epochs of this worker, the newest first, until those of a later one are whole."""

    kept: list[tuple[int, Copies]] = field(default_factory=list)

    def add(self, epoch: int, copies: Copies) -> None:
        self.kept.insert(0, (epoch, copies))

    def tidy(self) -> None:
        """Copies of epochs before one that has all of its own are gone."""
        for place, (_, copies) in enumerate(self.kept):
            if len(copies.whole) == SLOTS:
                del self.kept[place + 1 :]
                return

    def keys(self) -> tuple[Key, ...]:
        return tuple(
            Key(epoch=epoch, number=copy.number, step=copy.step) for epoch, copies in self.kept for copy in copies.whole
        )

    def copy(self, key: Key) -> Copy | None:
        found = (copy for epoch, copies in self.kept if epoch == key.epoch for copy in copies.whole)
        return next((copy for copy in found if copy.number == key.number), None)


@dataclass(slots=True, kw_only=True)
class _Member:
    """What of this worker outlives an epoch."""

    run_dir: Path
    board: Board
    name: str
    max_steps: int | None
    stop: StopRequest
    shelf: _Shelf = field(default_factory=_Shelf)
    step: int = 0
    corpus: Corpus | None = None
    outlook: Outlook = field(default_factory=Outlook)

    @property
    def cache(self) -> Path:
        return cache_root() / "data"

    def next_epoch(self, epoch: Epoch) -> Epoch:
        """The next one after `epoch` that this worker is in, once there is one, or the last of all."""
        epoch = self.board.epoch(epoch.number + 1)
        return self.next_epoch(epoch) if epoch.members and self.name not in epoch.members else epoch

    def prepare(self, expected: Epoch) -> None:
        """This worker has done before others wait for it what a process does only once, as one of those `expected`."""
        self.look_ahead(self.board.epoch(expected.number - 1), expected)
        if self.name in expected.members:
            assert self.corpus is not None, "the text is read first"
            design, rank = self.outlook.design(expected), self.outlook.ranks(expected)[self.name]
            with suppress(Exception):  # what fails alone is for all of them to meet, or need not fail with others
                rehearse(design, rank=rank, corpus=self.corpus)

    def look_ahead(self, before: Epoch, expected: Epoch) -> None:
        """What follows from the designs alone is known before the epoch comes that is `expected` after the one
        `before`, where this worker is to be in it."""
        if self.name in expected.members:
            self.outlook.predicted(expected)
            self.outlook.look_ahead(before, expected)

    def train(self, epoch: Epoch) -> Left | None:
        """This worker has left `epoch`, for the reason returned; None where the run has ended.

        An error that does not say that another rank is gone is raised: it would come again.
        """
        design = self.outlook.design(epoch)
        rank = design.plan.rank_on(epoch.members.index(self.name))
        if not self.board.arrive(epoch, self.name):
            return self._left(error="another rank ended before all had come")
        lines = Lines(self.board, epoch, name=self.name)
        with (
            _terminal(shown=epoch.screen and rank == 0) as screen,
            lines.watched(look_ahead=partial(self.look_ahead, epoch)),
        ):
            return self._train(design, rank=rank, epoch=epoch, screen=screen, lines=lines)

    def _train(self, design: Design, *, rank: int, epoch: Epoch, screen: TextIO, lines: Lines) -> Left | None:
        marker, words, runs = Marker(self.run_dir, rank=rank), LastWords(self.run_dir, rank=rank), list[Run]()
        error, waiting = "", None
        try:
            with formed_within(timedelta(seconds=max(design.job.peer_timeout_seconds, _FORMING_SECONDS))):
                place = self._place(design, rank=rank, screen=screen, marker=marker, store=lines.store)
                if self._run(design, place=place, epoch=epoch, runs=runs):
                    words.unneeded()
                    return None
        except Exception as caught:
            # Connections that were shut down for a loss fail in more words than those of one.
            broken = isinstance(caught, RuntimeError) and self.board.is_broken(epoch.number)
            theirs = failure.rank_of_save(caught) not in (None, rank)
            if not (broken or theirs or failure.is_lost_peer(caught)):
                words.of(caught)
                _tell(runs, caught)
                raise
            error, waiting = first_line(caught), waiting_of(caught, now=marker.now)
            lines.hang_up()
        words.unneeded()
        # Outside of the handler: what was raised refers to the run and to its groups.
        self._let_go(runs, lost=bool(error))
        return self._left(error=error, waiting=waiting)

    def _place(self, design: Design, *, rank: int, screen: TextIO, marker: Marker, store: dist.Store) -> Place:
        timeout = timedelta(seconds=design.job.peer_timeout_seconds)
        device = join(design, rank=rank, ranks=design.plan.world_size, local_device=rank, store=store, timeout=timeout)
        if rank == 0:
            keep_logs_of(self.run_dir, ranks=design.plan.world_size)
        return Place(
            rank=rank,
            device=device,
            run_dir=self.run_dir,
            cache=self.cache,
            screen=screen,
            marker=marker,
            log=CollectiveLog(self.run_dir, rank=rank),
            corpus=self.corpus,
        )

    def _run(self, design: Design, *, place: Place, epoch: Epoch, runs: list[Run]) -> bool:
        """Whether the run has ended; not where its ranks are to change. It is in `runs` from when it is built."""
        predicted = self.outlook.predicted(epoch)
        techniques = importlib.import_module("meshwright.techniques").build(design.job.all_techniques, design=design)
        run = build(
            design,
            place=place,
            predicted=predicted,
            max_steps=self.max_steps,
            stop_asked=self.stop,
            techniques=techniques,
            joining=self._joining(design, epoch, rank=place.rank),
        )
        runs.append(run)
        assert run.membership is not None, "it was built with what it joins"
        self.shelf.add(epoch.number, run.membership.copies)
        if place.rank == 0 and epoch.pause_at is None and self.max_steps is not None:
            self.board.note_pause(run.state.step + self.max_steps)
        limit_waits(timedelta(seconds=design.job.peer_timeout_seconds), but=CHECKPOINTS)
        start = time.perf_counter()
        with listening(place.log) if place.log is not None else nullcontext():
            ending = fit(run)
        if ending is Ending.REGROUPING:
            return False
        seconds = time.perf_counter() - start
        finish(run, run_dir=self.run_dir, predicted=predicted, ending=ending, seconds=seconds, stop=self.stop)
        return True

    def _joining(self, design: Design, epoch: Epoch, *, rank: int) -> Joining:
        change = Change(
            why=epoch.why,
            lost=epoch.lost,
            since=epoch.since,
            ranks=len(epoch.members),
            plan=design.plan.describe(),
            undone_steps=epoch.undone_steps,
            from_checkpoint=epoch.source is None,
        )
        return Joining(
            change_asked=partial(self._is_change_asked, epoch.number, rank, design.plan),
            change=change if epoch.number else None,
            inherited=self._inherited(epoch),
            pause_at=epoch.pause_at,
        )

    def _is_change_asked(self, epoch: int, rank: int, plan: Plan) -> bool:
        """Asked after every step, of rank 0 for all, which says so; copies that the newest make useless are gone.

        A learner, which would hear of a loss where it meets the others next, hears of it here.
        """
        gc.enable()
        self.shelf.tidy()
        if plan.learners > 1 and self.board.is_broken(epoch):
            raise failure.LostPeers("another rank is lost, which the launcher told", None)
        if rank == 0 and not self.board.is_at_work(epoch):
            self.board.note_at_work(epoch)
        return rank == 0 and self.board.is_change_asked(epoch)

    def _inherited(self, epoch: Epoch) -> Inherited | None:
        """What this process and the others have of the copy that the epoch goes on from."""
        key = epoch.source
        if key is None:
            return None
        before = self.board.epoch(key.epoch)
        had, now, ranks = self.outlook.plan(before), self.outlook.plan(epoch), self.outlook.ranks(before)
        found = origins(now, epoch.members, before=had, had=before.members, holders=epoch.holders)
        held = self.outlook.left(before, epoch, holders=epoch.holders)
        way = self.outlook.way(before, epoch, holders=epoch.holders)
        source, progress = State(held=held, own=Portable(tensors={})), None
        copy = self.shelf.copy(key) if self.name in epoch.holders else None
        if copy is not None:
            source = replace(source, own=Portable(tensors=copy.tensors), spares=copy.spares)
            tells = not found or ranks[self.name] in had.ranks_of_learner(donor_of(found))
            progress = copy.progress if tells else None
        return Inherited(step=key.step, source=source, progress=progress, origins=found, way=way)

    def _let_go(self, runs: Sequence[Run], *, lost: bool) -> None:
        for run in runs:
            self.step = run.state.step
            if not lost:
                if run.outer is not None:
                    run.outer.drain()
                run.marker.mark(step=run.state.step, section=Section.SAVE)
                run.close()
            abandon(run)

    def _left(self, *, error: str, waiting: Waiting | None = None) -> Left:
        return Left(step=self.step, copies=self.shelf.keys(), error=error, waiting=waiting)


def _tell(runs: Sequence[Run], error: BaseException) -> None:
    """As at the end of a run that fails: the marks say why, and a checkpoint that is under way is completed."""
    for run in runs:
        if run.observer is not None:
            run.observer.timekeeper.end(why=first_line(error))
        if isinstance(error, WorkerFailed):
            run.marker.mark(step=run.state.step, section=Section.SAVE)
            run.store.wait()


def _freeze() -> None:
    """What is of no use is gone and what is left stays: when ranks change next, only what the run since then leaves
    behind is looked for. Until a step is done nothing is: others wait for this process."""
    gc.collect()
    gc.freeze()
    gc.disable()


@contextmanager
def _terminal(*, shown: bool) -> Iterator[TextIO]:
    """Where rank 0 writes for a person: the launcher's standard error, which is nobody's own while ranks change."""
    with ExitStack() as stack:
        screen: TextIO = sys.stderr
        with suppress(OSError):
            if shown:
                screen = stack.enter_context(open(f"/proc/{os.getppid()}/fd/2", "a", encoding="utf-8"))
        yield screen
