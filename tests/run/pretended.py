"""Workers of an elastic run that do what a test says, and designs for as many as are left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.run.elastic.board import Board, Epoch, Key, Left, named
from meshwright.run.elastic.crew import Crew
from meshwright.run.elastic.templates import Templates
from meshwright.run.elastic.warden import Warden
from meshwright.run.failure import Failure, Nearness
from meshwright.run.files import write_json
from meshwright.run.launch import Agent
from meshwright.search import Hosts
from meshwright.spec.errors import Problem
from meshwright.spec.job import ElasticSpec
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.synchronize import GradientSync, SyncKind, usual_rounds
from tests.support import designs, models
from tests.support.designs import Layout

FIRST = tuple(named(place, times=0) for place in range(4))


class PretendCrew(Crew):
    """Workers that do what a test says."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._agents: dict[str, Agent] = {}
        self.running: dict[str, bool] = {}
        self.told: dict[str, Failure] = {}

    def start(self, name: str) -> None:
        self.running[name] = True

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.running)

    def is_here(self, name: str) -> bool:
        return name in self.running

    def has_ended(self, name: str) -> bool:
        return not self.running[name]

    def failure(self, name: str, *, rank: int) -> Failure | None:
        return replace(self.told[name], rank=rank) if name in self.told else None

    def kill(self, name: str) -> None:
        self.running[name] = False

    def fails(self, name: str, nearness: Nearness = Nearness.KILLED) -> None:
        self.running[name] = False
        problems = (Problem(what="a bad thing"),)
        self.told[name] = Failure(rank=0, nearness=nearness, exit_code=1, problems=problems, signal_number=9)

    def fails_locally(self, name: str, what: str) -> None:
        """With an error of what its host alone has."""
        self.running[name] = False
        own = Failure(rank=0, nearness=Nearness.OWN, exit_code=4, problems=(Problem(what=what),), local=True)
        self.told[name] = own


class PretendTemplates(Templates):
    """Plans of replicas, or of shards, or of learners of `each` shards, for every number of ranks but those that are
    not `known`."""

    def __init__(self, folder: Path, *, sharded: bool, known: tuple[int, ...], each: int = 0) -> None:
        self.each = max(each, 1)
        self._files = {ranks: folder / f"{ranks}.json" for ranks in known}
        for ranks, path in self._files.items():
            write_json(path, apart(ranks // each, each) if each else of(ranks, sharded=sharded))

    def of(self, hosts: Hosts) -> Path | None:
        ranks = sum(count for _, count in hosts)
        return self._files.get(ranks - ranks % self.each)


def apart(learners: int, each: int) -> Design:
    layout = Layout(replicate=learners, shard=each, sharding=Sharding.PARAMETERS if each > 1 else Sharding.NONE)
    made = designs.design(models.model(), replace(layout, batch=12))
    rounds = usual_rounds(SyncKind.STREAMING, every=8, learners=learners)
    plan = replace(made.plan, gradients=GradientSync(kind=SyncKind.STREAMING, rounds=rounds))
    return replace(made, plan=plan)


def of(ranks: int, *, sharded: bool) -> Design:
    layout = Layout(shard=ranks, sharding=Sharding.PARAMETERS) if sharded else Layout(replicate=ranks)
    return designs.design(models.model(), replace(layout, batch=12))


def warden(
    board: Board, folder: Path, *, sharded: bool = False, known: tuple[int, ...] = (4, 3, 2), each: int = 0
) -> Warden:
    templates = PretendTemplates(folder, sharded=sharded, known=known, each=each)
    made = Warden(
        run_dir=folder,
        board=board,
        crew=PretendCrew(board),
        templates=templates,
        spec=ElasticSpec(min_ranks=2, replacements=2),
        patience_seconds=60.0,
        epoch=Epoch(number=0, members=FIRST, design=str(templates.of(((0, 4),)))),
    )
    made.begin()
    return made


def crew_of(made: Warden) -> PretendCrew:
    assert isinstance(made.crew, PretendCrew)
    return made.crew


def leave(made: Warden, *names: str, newest: int, error: str = "connection closed by peer") -> None:
    """The workers have copies of the newest two of so many steps, and have ended the last."""
    for name in names:
        copies = tuple(Key(epoch=made.epoch.number, number=number, step=number) for number in (newest, newest - 1))
        made.board.leave(made.epoch.number, name, Left(step=newest, copies=copies, error=error))
